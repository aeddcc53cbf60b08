from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from megatron_ext.errors import UserError
from megatron_ext.inspect.passage import Passage, view_passage
from megatron_ext.inspect.passage_figure import COLUMNS, Cell, break_lines, cells_of, draw_passage, write_passage

PNG = b"\x89PNG\r\n\x1a\n"


def _passage(texts: list[str] | None, weights: list[float]) -> Passage:
    count = len(weights)
    return Passage(
        step=10**6,
        start=10**6,
        tokens=tuple(range(100, 100 + count)),
        texts=None if texts is None else tuple(texts),
        weights=tuple(weights),
        scores=(0.5,) * count,
    )


def _lines(text: str, columns: int) -> list[str]:
    lines = break_lines((Cell(char, False, 0, breaks=char == "·", ends=char == "↵") for char in text), columns)
    return ["".join(cell.glyph for cell in line) for line in lines]


def _boxes(figure) -> list[tuple[str, float, float]]:
    """Ground, row and width of each token's part of a line."""
    _, boxes = figure.axes[0].collections  # those of the legend come first
    grounds = [to_hex(colour) for colour in boxes.get_facecolors()]
    spans = [path.get_extents() for path in boxes.get_paths()]
    return [(ground, int(span.y0), span.width) for ground, span in zip(grounds, spans, strict=True)]


def test_lines_by_hand():
    assert _lines("the·dog·barked", 8) == ["the·dog·", "barked"]
    assert _lines("the·dog·barked", 7) == ["the·", "dog·", "barked"]
    assert _lines("a·barking", 4) == ["a·", "bark", "ing"]
    assert _lines("ab↵↵cd↵", 4) == ["ab↵", "↵", "cd↵"]
    assert _lines("abc↵d", 4) == ["abc↵", "d"]
    assert _lines("", 4) == []


@given(st.text("ab·↵"), st.integers(1, 9))
def test_lines_hold_everything_and_break_after_blanks(text, columns):
    lines = _lines(text, columns)
    assert "".join(lines) == text
    for line, following in pairwise(lines):
        assert 1 <= len(line) <= columns
        assert "↵" not in line[:-1]
        if line[-1] == "·":  # no room for the next word
            assert len(line) + len(following.split("·")[0].split("↵")[0]) + 1 > columns
        elif line[-1] != "↵":
            assert len(line) == columns
            assert "·" not in line


def test_cells_show_blanks_tabs_and_what_the_font_lacks():
    view = view_passage(_passage(["a b", "\t", "日\x1b\n"], [1.0, 1.0, 1.0]))
    cells = list(cells_of(view))
    assert "".join(cell.glyph for cell in cells) == "a·b→   □\\x1b↵"
    assert [cell.breaks for cell in cells].count(True) == 2
    assert [cell.ends for cell in cells] == [False] * 12 + [True]
    assert [cell.token for cell in cells] == [0] * 3 + [1] * 4 + [2] * 6


def test_ids_stand_apart():
    cells = list(cells_of(view_passage(_passage(None, [1.0, 2.0]))))
    assert "".join(cell.glyph for cell in cells) == "100 101"
    assert cells[3] == Cell(" ", False, -1, breaks=True)


@pytest.mark.filterwarnings("error")
def test_the_picture_has_a_ground_for_each_token_that_counts():
    texts = ["The", " $x^2$", " <b>", "\n", "日本", " end"]
    passage = _passage(texts, [1.0, 2.0, 0.0, 3.0, 1.5, 1.0])
    figure = draw_passage(passage, "run $1$")
    figure.canvas.draw()
    tokens = view_passage(passage).tokens
    expected = [(tokens[0], 0, 3), (tokens[1], 0, 6), (tokens[3], 0, 1), (tokens[4], 1, 2), (tokens[5], 1, 4)]
    assert _boxes(figure) == [(token.ground, row, width) for token, row, width in expected]
    drawn = "".join(text.get_text() for text in figure.axes[0].texts)
    assert "The·$x^2$·<b>↵□□·end" in drawn


@pytest.mark.filterwarnings("error")
def test_nothing_reaches_over_the_edge_or_into_its_neighbour():
    weights = [0.0, *(1 + 1e-5 * step for step in range(398)), 1234.5]
    figure = draw_passage(_passage(["mmmm"] * 400, weights), "a-long-name-of-a-run/" * 8)
    figure.canvas.draw()
    cell = figure.axes[0].transData.transform([(0, 0), (1, 0)])
    width = cell[1, 0] - cell[0, 0]
    for text in figure.axes[0].texts:
        extent = text.get_window_extent()
        assert extent.x1 < figure.bbox.x1
        assert extent.y1 < figure.bbox.y1
        if text.get_text() == "mmmm":
            assert extent.width == pytest.approx(4 * width, abs=0.5 * width)
    assert COLUMNS % 4 == 0
    assert [box[2] for box in _boxes(figure)] == [4] * 399


def test_a_picture_is_written_whole_or_not_at_all(tmp_path):
    passage = _passage(["a", "b"], [1.0, 2.0])
    path = tmp_path / "new" / "passage.png"
    assert write_passage(passage, "run", path) == path
    first = path.read_bytes()
    assert first.startswith(PNG)
    write_passage(passage, "run", path)
    assert path.read_bytes() == first
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OSError, match=r"taken\.png"):
        write_passage(passage, "run", tmp_path / "taken.png")
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["new", "passage.png", "taken.png"]
    with pytest.raises(UserError, match=r"output: got 'row.jpg', needs a file name that ends in .png"):
        write_passage(passage, "run", "row.jpg")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("weights", [[0.0], [1.0], [0.0, 5.0]])
def test_tiny_passages_are_drawn(weights):
    draw_passage(_passage(["\n"] * len(weights), weights), "").canvas.draw()
