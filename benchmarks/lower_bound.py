"""Compute a lower bound on the rows that any assignment of tokens to ranks moves, to compare plans with.

Consider one segment of n tokens. A rank that holds some of it needs all keys up to the last token that it holds; let
e_r be that token's position, counted from 1 (0 for a rank without one). It holds some of those keys itself, and the
ranks together hold n, so

    rows moved for the segment = e_1 + e_2 + ... + e_cp - n

Order the ranks by e, the largest first: all tokens after the (i+1)-th largest are on the first i ranks. These have
capacity for i t tokens (t = T/cp) and i c pairs (c: `tolerance` times the mean of all ranks). Their remaining capacity
is filled with other tokens, at best with the lightest of the row: those that come first in their segments. So the
(i+1)-th largest is at least

    f(i) = the smallest e such that  n - e <= i t  and  pairs of tokens e+1 ... n + pairs of the i t - (n - e) lightest
           tokens of the row <= i c

and the segment moves at least f(0) + f(1) + ... - n rows, with f(0) = n, summed until f is 0.

Each segment's bound assumes that all ranks are available to it alone, so the sum of the bounds is a bound for the row.
It is 0 for segments that fit on a rank; the cost of cutting short segments to fill ranks is not counted.
"""

from bisect import bisect_left

import numpy as np

from megatron_ext.layout import PackedLayout, segment_pairs


def fewest_rows(layout: PackedLayout, cp_size: int, tolerance: float) -> int:
    """Return a lower bound on the rows that any assignment to `cp_size` ranks moves, without left windows.

    `tolerance` is the upper bound of the slowest rank's attention pairs over the mean.
    """
    room = layout.tokens // cp_size
    bearable = tolerance * layout.attention_pairs() / cp_size + 1e-6  # pairs are counted; rounding must not lose one
    # by position in the segment: the number of tokens of the row there, and running sums of them and their pairs
    counts = len(layout.lengths) - np.cumsum(np.bincount(layout.lengths))[:-1]
    tokens = np.concatenate([[0], np.cumsum(counts)])
    pairs = np.concatenate([[0], np.cumsum(counts * np.arange(1, len(counts) + 1))])

    def lightest(number: int) -> int:
        place = int(np.searchsorted(tokens, number, side="right")) - 1
        return int(pairs[place]) + (number - int(tokens[place])) * (place + 1)

    def fits(length: int, end: int, ranks: int) -> bool:
        behind = segment_pairs(length) - segment_pairs(end)
        return behind + lightest(ranks * room - (length - end)) <= ranks * bearable

    rows = 0
    lengths, alike = np.unique(layout.lengths, return_counts=True)
    for length, times in zip(lengths[::-1].tolist(), alike[::-1].tolist(), strict=True):
        ends = [length]  # f(0), f(1), ...
        while ends[-1] and len(ends) <= cp_size:
            ranks = len(ends)
            possible = range(max(length - ranks * room, 0), ends[-1])
            first = bisect_left(possible, True, key=lambda end: fits(length, end, ranks))
            ends.append(possible.start + first)
        moved = sum(ends) - length
        if not moved:  # it fits on a rank, and so do shorter ones
            break
        rows += times * moved
    return rows
