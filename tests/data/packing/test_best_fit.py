"""Best-fit-decreasing by sizes against placing the items one by one."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.packing.best_fit import best_fit_decreasing


def one_by_one(sizes: list[int], capacity: int) -> Counter[int]:
    """The spaces left in the bins; which of two bins with the same space is taken makes no difference to them."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [space for space in spaces if space >= size]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - size)
    return Counter(spaces)


@given(capacity=st.integers(1, 30), data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_bins_are_those_of_one_by_one(capacity: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = best_fit_decreasing(np.array(sizes, dtype=np.int64), capacity)
    filled: dict[int, int] = defaultdict(int)
    for size, place in zip(sizes, bins.tolist(), strict=True):
        filled[place] += size
    assert sorted(filled) == list(range(len(filled)))
    assert Counter(capacity - total for total in filled.values()) == one_by_one(sizes, capacity)
