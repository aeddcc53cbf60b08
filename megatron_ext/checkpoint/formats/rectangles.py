"""Cut a run of a flattened matrix into rectangles of the matrix, as which it can be saved like the matrix itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """Covers rows row..row+height and columns column..column+width, consecutive elements of the flattened matrix."""

    row: int
    column: int
    height: int
    width: int

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.height * self.width


def rectangles(columns: int, start: int, end: int) -> Iterator[Rectangle]:
    """Cover the elements start..end of a matrix of `columns` columns, in order, by at most three rectangles.

    . . a a      a: the end of a row
    b b b b      b: whole rows
    b b b b
    c . . .      c: the beginning of a row
    """
    while start < end:
        row, column = divmod(start, columns)
        whole_rows = 0 if column else (end - start) // columns
        width = columns if whole_rows else min(columns - column, end - start)
        rectangle = Rectangle(row, column, whole_rows or 1, width)
        yield rectangle
        start += rectangle.size
