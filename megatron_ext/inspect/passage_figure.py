"""A weighted passage as a picture: monospaced text in lines of `COLUMNS` cells, each token on its ground."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from megatron_ext.inspect.passage import INK, MARK_ALPHA, ZERO_INK, Passage, PassageView, Token, view_passage
from megatron_ext.monitoring.figures import write_png
from megatron_ext.pages.colours import GREY

DPI = 160
COLUMNS = 100  # characters of a line
FONT = "DejaVu Sans Mono"  # comes with matplotlib
_SIZE = 10.0  # of the letters, in points
_ADVANCE = _SIZE * 1233 / 2048  # of every glyph of the font, in points
_LEADING = 1.75 * _SIZE  # from line to line, in points
_MARGIN = 2  # cells at the left and the right, and half as many lines above and below
_HEADER = 4.0  # lines of title, caption and legend
_RISE = 0.26  # of the letters' feet above the end of a line, in lines
_TAB = 4
_ABSENT = "\N{WHITE SQUARE}"  # for a character that the font lacks


class Cell(NamedTuple):
    """Holds one character of the picture; lines break after a blank, and end after a newline."""

    glyph: str
    marked: bool
    token: int  # its number, -1 for a gap
    breaks: bool = False
    ends: bool = False


class _Box(NamedTuple):
    """Paints the ground of a token in a line, from column `left` to `right`; "" is not painted."""

    row: float
    left: int
    right: int
    ground: str


def write_passage(passage: Passage, name: str, output: Path | str) -> Path:
    """Draw the passage of the run `name` into the PNG `output`, written aside and renamed; returns its path.

    Raises:
        UserError: `output` is no .png.
    """
    return write_png(lambda: draw_passage(passage, name), output, DPI)


def draw_passage(passage: Passage, name: str) -> Figure:
    """Draw the figure: title, caption and legend above the text."""
    view = view_passage(passage)
    lines = list(break_lines(cells_of(view), COLUMNS))
    columns, height = COLUMNS + 2 * _MARGIN, _HEADER + len(lines) + _MARGIN
    figure = Figure(figsize=(columns * _ADVANCE / 72, height * _LEADING / 72))
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(-_MARGIN, COLUMNS + _MARGIN))
    axis.set_ylim(len(lines) + _MARGIN / 2, -_HEADER - _MARGIN / 2)
    axis.set_axis_off()
    _draw_header(axis, view, f"{name}: token weights")
    _draw_lines(axis, view.tokens, lines)
    return figure


def cells_of(view: PassageView) -> Iterator[Cell]:
    """Yield the characters of all tokens; a blank is its mark, a tab a mark and blanks, a gap stands between ids."""
    for number, token in enumerate(view.tokens):
        if view.apart and number:
            yield Cell(" ", False, -1, breaks=True)
        for text, mark in token.pieces:
            if text == "\t":
                mark = mark.ljust(_TAB)
            shown = [*(mark or text)]
            for number_shown, char in enumerate(shown, start=1):
                blank = text in (" ", "\t") and number_shown == len(shown)
                glyph = char if ord(char) in _glyphs() else _ABSENT
                yield Cell(glyph, bool(mark), number, breaks=blank, ends=text == "\n")


def break_lines(cells: Iterable[Cell], columns: int) -> Iterator[list[Cell]]:
    """Break cells into lines of `columns` at most, after the last blank that fits; in a word only if it is longer."""
    line: list[Cell] = []
    for cell in cells:
        if len(line) == columns:
            end = next((column for column in range(columns, 0, -1) if line[column - 1].breaks), columns)
            yield line[:end]
            line = line[end:]
        line.append(cell)
        if cell.ends:
            yield line
            line = []
    if line:
        yield line


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap())


def _draw_lines(axis: Axes, tokens: Sequence[Token], lines: Sequence[Sequence[Cell]]) -> None:
    boxes: list[_Box] = []
    for row, line in enumerate(lines):
        column = 0
        for number, run in groupby(line, lambda cell: cell.token):
            cells = list(run)
            ground = tokens[number].ground if number >= 0 else ""
            boxes.append(_Box(row, column, column + len(cells), ground))
            for marked, part in groupby(cells, lambda cell: cell.marked):
                glyphs = "".join(cell.glyph for cell in part)
                _write(axis, column, row, glyphs, INK if ground else ZERO_INK, MARK_ALPHA if marked else 1.0)
                column += len(glyphs)
    _paint(axis, boxes)


def _draw_header(axis: Axes, view: PassageView, title: str) -> None:
    size = min(14.0, 14.0 * 55 / len(title))
    axis.text(0, 1 - _HEADER - _RISE, title, fontsize=size, fontweight="bold", color=INK, parse_math=False)
    _write(axis, 0, 1.3 - _HEADER, view.caption, GREY)
    row = 2.6 - _HEADER
    _write(axis, 0, row, "weight", GREY)
    column, boxes = len("weight "), []
    for label, ground in view.legend:
        end = column + len(label) + 2
        boxes.append(_Box(row, column, end, ground))
        _write(axis, column + 1, row, label, INK if ground else ZERO_INK)
        column = end
    _paint(axis, boxes)


def _paint(axis: Axes, boxes: Iterable[_Box]) -> None:
    low, high = 0.08, 0.95
    painted = [box for box in boxes if box.ground]
    corners = [
        [(box.left, box.row + low), (box.right, box.row + low), (box.right, box.row + high), (box.left, box.row + high)]
        for box in painted
    ]
    grounds = [box.ground for box in painted]
    axis.add_collection(PolyCollection(corners, facecolors=grounds, edgecolors="white", linewidths=0.6))


def _write(axis: Axes, column: int, row: float, text: str, colour: str, alpha: float = 1.0) -> None:
    if not text.isspace():
        foot = row + 1 - _RISE
        axis.text(column, foot, text, family=FONT, fontsize=_SIZE, color=colour, alpha=alpha, parse_math=False)
