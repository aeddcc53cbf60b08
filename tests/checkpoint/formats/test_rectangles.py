"""A run of a flattened matrix as rectangles."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.checkpoint.formats.rectangles import Rectangle, rectangles


def test_the_drawn_example() -> None:
    assert list(rectangles(4, 2, 13)) == [Rectangle(0, 2, 1, 2), Rectangle(1, 0, 2, 4), Rectangle(3, 0, 1, 1)]


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), data=st.data())
def test_they_are_the_run_in_order_and_three_at_most(rows: int, columns: int, data: st.DataObject) -> None:
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, rows * columns)] * 2)))
    matrix = np.arange(rows * columns).reshape(rows, columns)
    cut = list(rectangles(columns, start, end))
    found = [matrix[r.row : r.row + r.height, r.column : r.column + r.width] for r in cut]
    assert [part.shape for part in found] == [(r.height, r.width) for r in cut]
    assert [int(x) for part in found for x in part.ravel()] == list(range(start, end))
    assert len(cut) <= 3
