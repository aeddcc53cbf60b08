"""The lengths of documents, against numpy's definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.build.lengths import EDGES, length_statistics, length_table

LENGTHS = st.lists(st.one_of(st.integers(0, 2**21), st.sampled_from([2**k + d for k in range(20) for d in (-1, 0)])))


@given(lengths=LENGTHS)
def test_lengths_fall_into_their_bins(lengths: list[int]) -> None:
    table = length_table(np.array(lengths, np.int64))
    for row, low, high in zip(table, EDGES, [*EDGES[1:], np.inf], strict=True):
        inside = [length for length in lengths if low <= length < high]
        assert (row["documents"], row["tokens"]) == (len(inside), sum(inside))


def test_by_hand() -> None:
    """Lengths 1, 1, 1, 5: mean 2, m2 = (3 + 9) / 4 = 3, m3 = (-3 + 27) / 4 = 6, m4 = (3 + 81) / 4 = 21."""
    found = length_statistics(np.array([1, 1, 1, 5]))
    assert found is not None
    assert (found["mean"], found["median"], found["p75"], found["max"]) == (2, 1, 2, 5)
    assert (found["skewness"], found["kurtosis"]) == pytest.approx((6 / 3**1.5, 21 / 9 - 3))
    assert length_statistics(np.array([3, 3]))["kurtosis"] is None  # type: ignore[index]
    assert length_statistics(np.zeros(0, np.int64)) is None
