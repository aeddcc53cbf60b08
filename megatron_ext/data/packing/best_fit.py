"""Best-fit-decreasing bin packing, one size at a time (arXiv 2404.10830)."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from megatron_ext.arrays import Int64


def best_fit_decreasing(sizes: Int64, capacity: int) -> Int64:
    """Pack items into bins, largest first, each into the bin with the least remaining space.

    Items of one size are placed together: until all are placed, the fullest bins with enough space for one take as many
    as fit. The result equals that of placing them one by one, because a bin that took one remains the fullest with
    space for another. So the run time depends on the number of distinct sizes and spaces, not of items.

    Args:
        sizes: int64 [n], each in 1..capacity.
        capacity: of every bin.

    Returns:
        int64 [n], the bin of each item, 0, 1, 2, ...; items of one size in their order of appearance.
    """
    assert not sizes.size or 1 <= sizes.min() <= sizes.max() <= capacity
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(len(sizes), dtype=np.int64)  # bins of the items in `order`
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
    """Bins indexed by their remaining space."""

    def __init__(self) -> None:
        self._by_space: dict[int, list[int]] = {}
        self._spaces: list[int] = []  # sorted; those with a bin
        self._count = 0

    def smallest_space(self, size: int) -> int | None:
        """Return the smallest space of a bin that is at least `size`; None if there is none."""
        first = bisect_left(self._spaces, size)
        return self._spaces[first] if first < len(self._spaces) else None

    def add_new(self, count: int, capacity: int) -> None:
        self.put(list(range(self._count, self._count + count)), capacity)
        self._count += count

    def put(self, bins: list[int], space: int) -> None:
        """Add bins with this space; full ones are dropped."""
        if not space:
            return
        if space not in self._by_space:
            self._by_space[space] = []
            insort(self._spaces, space)
        self._by_space[space] += bins

    def take(self, space: int, most: int) -> list[int]:
        """Remove and return up to `most` of the bins with this space."""
        waiting = self._by_space[space]
        taken = waiting[-most:]
        del waiting[-most:]
        if not waiting:
            del self._by_space[space]
            self._spaces.pop(bisect_left(self._spaces, space))
        return taken
