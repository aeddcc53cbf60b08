"""Best-fit-decreasing bin packing, a size at a time (arXiv 2404.10830)."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from megatron_ext.arrays import Int64


def best_fit_decreasing(sizes: Int64, capacity: int) -> Int64:
    """Put items into bins, the largest first, each into the bin that it leaves the least space in.

    The items of one size go together: until all are placed, the fullest bins that still hold one take as many
    as they hold. That is what placing them one by one does, because a bin that took one stays the fullest
    that holds another. So the work follows the distinct sizes and spaces, not the items.

    Args:
        sizes: int64 [n], each in 1..capacity.
        capacity: of every bin.

    Returns:
        int64 [n], the bin of each item, 0, 1, 2, ...; items of one size in their order of appearance.
    """
    assert not sizes.size or 1 <= sizes.min() <= sizes.max() <= capacity
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(len(sizes), dtype=np.int64)  # of the items in `order`
    distinct, counts = np.unique(sizes, return_counts=True)
    open_bins = _OpenBins()
    placed = 0
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        rest = count
        while rest:
            space = open_bins.smallest_space(size)
            if space is None:
                space = capacity
                open_bins.add_new(-(-rest // (capacity // size)), capacity)
            each = min(space // size, rest)
            taken = open_bins.take(space, rest // each)
            open_bins.put(taken, space - each * size)
            bins[placed : placed + each * len(taken)] = np.repeat(taken, each)
            placed += each * len(taken)
            rest -= each * len(taken)
    result = np.empty_like(bins)
    result[order] = bins
    return result


class _OpenBins:
    """Bins by the space left in them."""

    def __init__(self) -> None:
        self._by_space: dict[int, list[int]] = {}
        self._spaces: list[int] = []  # sorted; those with a bin
        self._count = 0

    def smallest_space(self, size: int) -> int | None:
        """Find the least space of at least `size` that a bin has."""
        first = bisect_left(self._spaces, size)
        return self._spaces[first] if first < len(self._spaces) else None

    def add_new(self, count: int, capacity: int) -> None:
        self.put(list(range(self._count, self._count + count)), capacity)
        self._count += count

    def put(self, bins: list[int], space: int) -> None:
        """Add bins with this space; full ones are forgotten."""
        if not space:
            return
        if space not in self._by_space:
            self._by_space[space] = []
            insort(self._spaces, space)
        self._by_space[space] += bins

    def take(self, space: int, most: int) -> list[int]:
        """Take out up to `most` of the bins with this space."""
        waiting = self._by_space[space]
        taken = waiting[-most:]
        del waiting[-most:]
        if not waiting:
            del self._by_space[space]
            self._spaces.pop(bisect_left(self._spaces, space))
        return taken
