"""Rows assigned by cost: each once, evenly, and never worse than the rows in order."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.rows.balance import assign_rows


@given(data=st.data(), ranks=st.integers(1, 5), micro_batches=st.integers(1, 4), rows=st.integers(1, 3))
def test_every_row_once_and_evenly(data: st.DataObject, ranks: int, micro_batches: int, rows: int) -> None:
    count = ranks * micro_batches * rows
    costs = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count)), dtype=float)
    assigned = assign_rows(costs, ranks, micro_batches)
    assert assigned.shape == (ranks, micro_batches, rows)
    assert sorted(assigned.reshape(-1)) == list(range(count))
    loads = costs[assigned].sum(axis=(1, 2))
    # within the dearest micro-batch of an even share
    slots = costs[assigned].sum(axis=2)
    assert loads.max() <= loads.mean() + slots.max() + 1e-9
    assert (np.diff(slots, axis=1) <= 1e-9).all()  # from dear to cheap
    for unit in (1, 2.0**-20, 2.0**50):
        np.testing.assert_array_equal(assign_rows(costs * unit, ranks, micro_batches), assigned)


@given(costs=st.lists(st.integers(0, 50), min_size=6, max_size=6))
def test_two_ranks_against_all_ways(costs: list[int]) -> None:
    """Swapping ends where no single swap helps: within a small factor of the best of all ways."""
    assigned = assign_rows(costs, 2, 3)
    largest = max(sum(costs[row] for row in rank.reshape(-1)) for rank in assigned)
    best = min(
        max(sum(costs[row] for row in half), sum(costs) - sum(costs[row] for row in half))
        for half in itertools.combinations(range(6), 3)
    )
    assert best <= largest <= best * 1.2 + 1e-9
