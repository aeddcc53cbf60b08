from __future__ import annotations

import codecs
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from monitoring.records import passage_record, write_passage_file

from megatron_ext.errors import UserError
from megatron_ext.inspect.passage import INK, ZERO_INK, Piece, pieces, read_passage, scale_of, view_passage

WEIGHTS = st.lists(st.floats(0, 100).map(lambda weight: round(weight, 2)), min_size=1, max_size=60).map(tuple)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB as WCAG 2 defines it."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(light: str, dark: str) -> float:
    return (_luminance(light) + 0.05) / (_luminance(dark) + 0.05)


def test_a_passage_is_read_as_it_was_written(tmp_path):
    passage = read_passage(write_passage_file(tmp_path))
    record = passage_record()
    assert {name: getattr(passage, name) for name in record} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    assert read_passage(write_passage_file(tmp_path, texts=None)).texts is None


def test_a_folder_without_a_passage_is_told(tmp_path):
    with pytest.raises(UserError, match=r"passage\.json: not found, needs a run with token weighting"):
        read_passage(tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = write_passage_file(tmp_path) / "passage.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"passage\.json: damaged: invalid JSON: .*; delete the file"):
            read_passage(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": [1.0, 2.0]}, "`weights` has 2 entries, needs 4 as `tokens`"),
        ({"scores": []}, "`scores` has 0 entries, needs 4 as `tokens`"),
        ({"texts": ["a"]}, "`texts` has 1 entries, needs 4 as `tokens`"),
        ({"weights": [1.0, float("nan"), 1.0, 1.0]}, "`weights`[1]: input should be a finite number"),
        ({"tokens": [1, True, 2, 3]}, "`tokens`[1]: input should be a valid integer"),
        ({"texts": [1, "a", "b", "c"]}, "`texts`[0]: input should be a valid string"),
        ({"step": -1}, "`step`: input should be greater than or equal to 0"),
        ({"tokens": [], "texts": [], "weights": [], "scores": []}, "`tokens`: tuple should have at least 1 item"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, changes, reason):
    with pytest.raises(UserError) as error:
        read_passage(write_passage_file(tmp_path, **changes))
    assert str(error.value).startswith(f"{tmp_path / 'passage.json'}: {reason}")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(passage_record())), value=ANY_JSON)
def test_whatever_a_field_holds_is_shown_or_refused_in_a_line(tmp_path, key, value):
    write_passage_file(tmp_path, **{key: value})
    try:
        passage, refusal = read_passage(tmp_path), ""
    except UserError as error:
        passage, refusal = None, str(error)
    assert passage is None or len(view_passage(passage).tokens) == 4
    assert passage is not None or refusal.startswith(f"{tmp_path / 'passage.json'}: ")
    assert "\n" not in refusal


@given(WEIGHTS)
def test_heavier_is_darker_and_every_letter_is_legible(weights):
    scale = scale_of(weights)
    assert all((scale.ground(weight) == "") == (weight == 0) for weight in weights)
    grounds = [scale.ground(weight) for weight in sorted(weights) if weight]
    light = [_luminance(ground) for ground in grounds]
    assert light == sorted(light, reverse=True)
    assert all(_contrast(ground, INK) >= 7 for ground in grounds)  # WCAG's AAA
    assert _contrast("white", ZERO_INK) >= 4.5  # its AA


@given(WEIGHTS)
def test_the_legend_ends_where_the_weights_do(weights):
    scale = scale_of(weights)
    legend = list(scale.legend())
    assert (legend[0] == ("0", "")) == (0 in weights)
    drawn = [swatch for swatch in legend if swatch.ground]
    assert bool(drawn) == any(weights)
    if drawn:
        positive = [weight for weight in weights if weight]
        assert drawn[0].ground == scale.ground(min(positive))
        assert drawn[-1].ground == scale.ground(max(positive))
        assert drawn[-1].label.endswith(f"{max(positive):#.3g}".rstrip("."))
        light = [_luminance(swatch.ground) for swatch in drawn]
        assert light == sorted(light, reverse=True)


def test_an_outlier_does_not_flatten_the_others():
    weights = tuple(0.75 + step / 100 for step in range(100))
    scale, with_outlier = scale_of(weights), scale_of((*weights, 1e6))
    far = [abs(_luminance(scale.ground(w)) - _luminance(with_outlier.ground(w))) for w in weights]
    assert max(far) < 0.02
    assert list(with_outlier.legend())[-1].label.endswith(" to 1.00e+06")


@pytest.mark.parametrize(
    ("weights", "labels", "dark"),
    [
        ((5.0, 0.0, 0.0, 5.0), ["0", "5.00"], True),  # sparse
        ((1.0, 1.0, 1.0), ["1.00"], False),  # uniform
        ((0.0, 0.0), ["0"], None),  # nothing trained
        ((1.0,) * 99 + (9.0,), ["1.00", "1.00 to 9.00"], True),
        ((1.0, 3.0), ["1.00", "1.49", "1.98", "2.47", "2.96 to 3.00"], True),
    ],
)
def test_scales_by_hand(weights, labels, dark):
    scale = scale_of(weights)
    assert [swatch.label for swatch in scale.legend()] == labels
    if dark is not None:
        assert _luminance(scale.ground(max(weights))) == pytest.approx(_luminance("#f08c4f" if dark else "#fff6e5"))


def test_a_uniform_passage_with_an_outlier_stays_pale():
    scale = scale_of((0.0,) + (1.0,) * 99 + (9.0,))
    assert [scale.ground(weight) for weight in (0.0, 1.0, 9.0)] == ["", "#fff6e5", "#f08c4f"]


def test_what_does_not_show_itself_is_marked():
    assert list(pieces("a b\t\n\x1b\u200b\xa0é")) == [
        Piece("a", ""),
        Piece(" ", "·"),
        Piece("b", ""),
        Piece("\t", "→"),
        Piece("\n", "↵"),
        Piece("", r"\x1b"),
        Piece("", r"\u200b"),
        Piece("", r"\xa0"),
        Piece("é", ""),
    ]


@given(st.text())
def test_pieces_lose_nothing(text):
    cut = list(pieces(text))
    assert "".join(piece.text or codecs.decode(piece.mark, "unicode_escape") for piece in cut) == text
    assert all(piece.mark or (piece.text.isprintable() and " " not in piece.text) for piece in cut)


def test_a_token_without_text_shows_its_id(tmp_path):
    view = view_passage(read_passage(write_passage_file(tmp_path, texts=["a", "", "b", "c"])))
    assert view.tokens[1].pieces == (Piece("", "#12"),)
    assert not view.apart
    view = view_passage(read_passage(write_passage_file(tmp_path, texts=None)))
    assert [token.pieces for token in view.tokens] == [(Piece(str(token), ""),) for token in (11, 12, 13, 14)]
    assert view.apart


def test_a_score_that_was_not_finite_is_told(tmp_path):
    write_passage_file(tmp_path, scores=[None, 0.1, 0.2, 0.3])
    assert json.loads((tmp_path / "passage.json").read_text())["scores"][0] is None
    assert view_passage(read_passage(tmp_path)).tokens[0].hint.endswith("weight 0.750, score not finite")
