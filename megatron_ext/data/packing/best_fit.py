"""Best-fit-decreasing bin packing, one size at a time (arXiv 2404.10830)."""

from bisect import bisect_left, insort

import numpy as np

from megatron_ext.arrays import Int64


def best_fit_decreasing(sizes: Int64, capacity: int) -> Int64:
    """Pack items of `sizes`, int64 [n], into bins, largest first, each into the bin with the least remaining space.

    Items of one size are placed together: until all are placed, the fullest bins with enough space for one take as many
    as fit. Placed one by one they would get the same bins, because a bin that took one remains the fullest with space
    for another. So the run time depends on the number of distinct sizes and spaces, not of items.

    Returns int64 [n], the bin of each item, 0, 1, 2, ...; items of one size in their order of appearance.
    """
    assert not sizes.size or 1 <= sizes.min() <= sizes.max() <= capacity
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(len(sizes), dtype=np.int64)  # bins of the items in `order`
    distinct, counts = np.unique(sizes, return_counts=True)
    open_bins: dict[int, list[int]] = {}  # by their remaining space; full ones are dropped
    spaces: list[int] = []  # of open bins, sorted

    def put(added: list[int], space: int) -> None:
        if not space:
            return
        if space not in open_bins:
            open_bins[space] = []
            insort(spaces, space)
        open_bins[space] += added

    placed = opened = 0
    by_size = zip(distinct.tolist(), counts.tolist(), strict=True)
    for size, count in reversed(list(by_size)):
        unplaced = count
        while unplaced:
            fullest = bisect_left(spaces, size)
            if fullest == len(spaces):
                needed = -(-unplaced // (capacity // size))
                put(list(range(opened, opened + needed)), capacity)
                opened += needed
            space = spaces[fullest]
            items_per_bin = min(space // size, unplaced)
            candidates = open_bins[space]
            filled = candidates[-(unplaced // items_per_bin) :]
            del candidates[-len(filled) :]
            if not candidates:
                del open_bins[space], spaces[fullest]
            put(filled, space - items_per_bin * size)
            items = np.repeat(filled, items_per_bin)
            bins[placed : placed + len(items)] = items
            placed += len(items)
            unplaced -= len(items)
    result = np.empty_like(bins)
    result[order] = bins
    return result
