from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monitoring.records import passage_record, write_passage_file

from megatron_ext.errors import UserError
from megatron_ext.inspect.passage import opacity, passage_html, read_passage, scale_of

WEIGHTS = st.lists(st.floats(0, 100).map(lambda weight: round(weight, 2)), min_size=1, max_size=60).map(tuple)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


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
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"passage\.json: damaged: invalid JSON: .*; delete the file"):
            read_passage(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": [1.0, 2.0]}, "`weights` has 2 entries, needs 4 as `tokens`"),
        ({"weights": [1.0, float("nan"), 1.0, 1.0]}, "`weights`[1]: input should be a finite number"),
        ({"tokens": [1, True, 2, 3]}, "`tokens`[1]: input should be a valid integer"),
        ({"step": -1}, "`step`: input should be greater than or equal to 0"),
        ({"tokens": [], "texts": [], "weights": [], "scores": []}, "`tokens`: tuple should have at least 1 item"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, changes, reason):
    with pytest.raises(UserError) as error:
        read_passage(write_passage_file(tmp_path, **changes))
    assert str(error.value).startswith(f"{tmp_path / 'passage.json'}: {reason}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(passage_record())), value=ANY_JSON)
def test_whatever_a_field_holds_is_shown_or_refused_in_a_line(tmp_path, key, value):
    write_passage_file(tmp_path, **{key: value})
    try:
        passage, refusal = read_passage(tmp_path), ""
    except UserError as error:
        passage, refusal = None, str(error)
    assert passage is None or passage_html(passage).count("<span") == 4
    assert passage is not None or refusal.startswith(f"{tmp_path / 'passage.json'}: ")
    assert "\n" not in refusal


@given(WEIGHTS)
def test_heavier_tokens_have_a_stronger_background(weights):
    low, high = scale_of(np.array(weights))
    shown = [opacity(weight, low, high) for weight in sorted(weights) if weight]
    assert shown == sorted(shown)
    assert all(0 < one <= 0.8 for one in shown)


def test_an_outlier_does_not_flatten_the_others():
    weights = [0.75 + step / 100 for step in range(100)]
    scale, with_outlier = scale_of(np.array(weights)), scale_of(np.array([*weights, 1e6]))
    assert max(abs(opacity(w, *scale) - opacity(w, *with_outlier)) for w in weights) < 0.02
