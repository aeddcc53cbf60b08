"""Distribute the rows of a global batch over ranks and micro-batches with balanced load.

The attention cost of a row is its number of (query, key) pairs: a row of one long document costs much more than a row
of short ones. The gradient is a sum over the global batch, independent of which rank computes which row, so rows can be
assigned by cost (ProLong's smart batching, arXiv 2410.02660). Four rows on two ranks:

    cost     9 1 1 9         in order   rank 0: 9 1   rank 1: 1 9    slots 9 against 1, 1 against 9
                             balanced   rank 0: 9 1   rank 1: 9 1    both ranks and both slots are even
"""

from collections.abc import Sequence

import numpy as np

from megatron_ext.arrays import Float64, Int64


def assign_rows(costs: Sequence[float] | Float64, ranks: int, micro_batches: int) -> Int64:
    """Assign rows to micro-batches, and micro-batches to ranks.

    The most expensive rows are assigned first, each to the cheapest micro-batch with space; then pairs are swapped as
    long as that reduces the cost of the most expensive rank. A rank's micro-batches are ordered by decreasing cost, so
    that ranks compute similar ones at the same time.

    `costs` has the cost of each of the B rows of a global batch, in any unit; B is a multiple of `ranks` x
    `micro_batches` (of each rank). Returns int64 [ranks, micro_batches, rows of each], in which every row occurs once.
    """
    cost = np.asarray(costs, dtype=np.float64)
    assert len(cost) % (ranks * micro_batches) == 0, (len(cost), ranks, micro_batches)
    rows = _assign(cost, ranks * micro_batches)
    slots = cost[rows].sum(axis=1)
    owner = _assign(slots, ranks)
    _even_out(owner, slots)
    order = np.argsort(-slots[owner], axis=1, kind="stable")
    return rows[np.take_along_axis(owner, order, axis=1)]


def _assign(cost: Float64, bins: int) -> Int64:
    """Assign items to bins, int64 [bins, n / bins], by decreasing cost, each to the cheapest bin with space."""
    space = len(cost) // bins
    members = np.empty((bins, space), dtype=np.int64)
    filled = np.zeros(bins, dtype=np.int64)
    load = np.zeros(bins)
    for item in np.argsort(-cost, kind="stable"):
        cheapest = int(np.argmin(np.where(filled < space, load, np.inf)))
        members[cheapest, filled[cheapest]] = item
        filled[cheapest] += 1
        load[cheapest] += cost[item]
    return members


def _even_out(members: Int64, cost: Float64) -> None:
    """Swap items of the most expensive bin as long as both bins' loads end up below its current load."""
    for _ in range(members.size):
        load = cost[members].sum(axis=1)
        worst = int(load.argmax())
        # [its items, other bins, their items]: reduction of the worst bin's load by each swap
        loss = cost[members[worst]][:, None, None] - cost[members][None]
        after = np.maximum(load[worst] - loss, load[None, :, None] + loss)
        after[:, worst] = np.inf
        item, other_bin, other_item = np.unravel_index(int(after.argmin()), after.shape)
        if after[item, other_bin, other_item] >= load[worst] * (1 - 1e-9):  # avoids endless swaps due to rounding
            return
        moved = members[worst, item]
        members[worst, item] = members[other_bin, other_item]
        members[other_bin, other_item] = moved
