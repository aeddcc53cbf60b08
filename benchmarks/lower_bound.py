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

If queries may move as well, to ranks that have keys, and outputs back, a rank needs the keys up to the last token whose
query is only at home. Let m tokens of a segment be such, a key and value cost k, and a query and output q. The
(i+1)-th largest e is at least m - i t, and a rank fetches at least e - t, so the cost is at least

    k (max(m - t, 0) + max(m - 2 t, 0) + ...) + q (n - m)

which is least if token j (from 0) costs the smaller of k floor(j / t) and q. Where heads do not share keys, this holds
for the queries and keys of each key head, whatever other ranks compute for the other heads: Ulysses is such a case.

Where all heads of a token see the same keys (latent attention), or move together, balance counts too. Let s tokens have
moved queries, in the mean over heads. At best these are among the last of a segment, whose pairs then count for no
rank, and among those that fill ranks, so f(i) is the smallest e such that

    n - s - e <= i t  and  pairs of tokens e+1 ... n - s + pairs of the i t - (n - e) - s lightest <= i c

(pairs are convex in the number of moved queries of a head, so the mean over heads has the least). The cost is at least
the least over s of k (f(0) + f(1) + ... - n) + q s.
"""

import itertools
from bisect import bisect_left

import numpy as np

from megatron_ext.layout import PackedLayout, segment_pairs


def fewest_rows(layout: PackedLayout, cp_size: int, tolerance: float, moved_queries: int = 0) -> int:
    """Return a lower bound on the rows that any assignment to `cp_size` ranks moves, without left windows.

    `tolerance` is the upper bound of the slowest rank's attention pairs over the mean, `moved_queries` the number of
    tokens whose queries other ranks may compute as well.
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
        behind = segment_pairs(max(length - moved_queries, end)) - segment_pairs(end)
        filled = max(ranks * room - (length - end) - moved_queries, 0)
        return behind + lightest(filled) <= ranks * bearable

    rows = 0
    lengths, alike = np.unique(layout.lengths, return_counts=True)
    for length, times in zip(lengths[::-1].tolist(), alike[::-1].tolist(), strict=True):
        ends = [max(length - moved_queries, 0)]  # f(0), f(1), ...
        while ends[-1] and len(ends) <= cp_size:
            ranks = len(ends)
            possible = range(max(length - moved_queries - ranks * room, 0), ends[-1])
            first = bisect_left(possible, True, key=lambda end: fits(length, end, ranks))
            ends.append(possible.start + first)
        moved = max(sum(ends) - length, 0)
        if not moved:  # it fits on a rank, and so do shorter ones
            break
        rows += times * moved
    return rows


def least_cost(layout: PackedLayout, cp_size: int, tolerance: float, key: int, query: int, *, together: bool) -> int:
    """Return a lower bound on what any assignment moves if queries and outputs may move as well.

    Args:
        key, query: the cost of moving the keys and values of a token, and its queries and outputs.
        together: whether all heads of a token see the same keys, or move together.
    """
    room = layout.tokens // cp_size
    token = np.arange(layout.lengths.max())
    costs = np.concatenate([[0], np.cumsum(np.minimum(key * (token // room), query))])
    least = int(costs[layout.lengths].sum())
    if not together:
        return least
    balanced = key * fewest_rows(layout, cp_size, tolerance)  # without moved queries
    numbers = np.unique(np.geomspace(1, layout.tokens, 1000).astype(np.int64)).tolist()
    for fewer, more in itertools.pairwise([0, *numbers]):  # with fewer + 1 to more of them
        if query * fewer >= balanced:
            break
        balanced = min(balanced, key * fewest_rows(layout, cp_size, tolerance, more) + query * (fewer + 1))
    return max(least, balanced)
