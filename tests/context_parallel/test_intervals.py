"""Intervals in bulk, against the same one number at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.context_parallel.intervals import overlaps, ranges

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8)
QUERIES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8)
STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=8)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


@given(PAIRS)
def test_ranges(pairs: list[tuple[int, int]]) -> None:
    assert ranges(*columns(pairs)).tolist() == [start + i for start, length in pairs for i in range(length)]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=8),
)
def test_overlaps_are_the_numbers_that_both_hold(queries: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
    gaps, lengths = columns(steps)
    ends = np.cumsum(gaps + lengths)
    starts = ends - lengths
    low, size = columns(queries)
    query, interval, begin, stop = overlaps(low, low + size, starts, ends)
    assert (begin < stop).all()
    shared = [(q, i, n) for q, i, a, b in zip(query, interval, begin, stop, strict=True) for n in range(a, b)]
    assert shared == [
        (q, i, n)
        for q, (first, count) in enumerate(queries)
        for i, (a, b) in enumerate(zip(starts, ends, strict=True))
        for n in range(max(first, a), min(first + count, b))
    ]
