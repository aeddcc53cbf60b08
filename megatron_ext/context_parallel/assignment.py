"""Assign tokens to ranks, by policy.

`balanced` gives ranks equal numbers of tokens and similar numbers of attention pairs, and moves few rows. Ranks are
filled one after the other, starting with the heaviest segments. A rank gets t = T/cp tokens and up to `tolerance` times
the mean attention pairs. The unassigned part of a segment is always one *interval*; its density is its pairs per token.
There are three moves, tried from the densest interval to the lightest:

    heavy      too many pairs for a rank: one rank gets its end, together with the lightest tokens available
               [. . . . . . . . . . . . 0 0 0 0]        a shorter interval remains
    long       at least t tokens and not too dense: each rank gets t tokens from both ends, a zigzag
               [0 0 1 1 2 2 . . . . 2 2 1 1 0 0]        the rest keeps its density
    the rest   whole intervals, chosen so that tokens and pairs run out together; one cut then fills the rank
               [0 0 0 0] [0 0 0] [0 0 . . . 0 0]        cut where it moves few rows and leaves no heavy rest

So a segment that spans the row becomes a zigzag, and documents stay whole except for about one per rank. Segments of up
to t/32 tokens are not handled individually: they are concatenated, sorted by length (`ShortSegments`), and a rank gets
runs from both ends. So the run time depends on the number of ranks, not on the number of segments.

An example: segments a, b, c, d of 11, 10, 9, 2 tokens on 4 ranks. t = 8; the mean is 42 pairs, and the limit at a
tolerance of 1.1 is 46. An uncut segment of n tokens has a density of (n+1)/2 pairs per token.

    rank 0   a is the densest, and 8 tokens of it have 6.0 x 8 = 48 pairs: heavy. Gets 4 tokens of its end (38 pairs)
             and the lightest tokens: d (3) and 2 tokens from the front of c (3); 44 pairs
    rank 1   b is long and not too dense: 5.5 x 8 = 44 pairs. Gets 4 tokens from its front, 4 from its back
    rank 2   no interval is long any more. The rest of c, 7 tokens of density 6.0, fits whole (42); one token is cut
             from the front of a (1); 43 pairs
    rank 3   gets the rest, 6 tokens of a and 2 of b; 38 pairs

    a  2 3 3 3 3 3 3 0 0 0 0      b  1 1 1 1 3 3 1 1 1 1      c  0 0 2 2 2 2 2 2 2      d  0 0
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import merge
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.layout import PackedLayout, segment_pairs

TOLERANCES = (1.03, 1.05, 1.065, 1.08, 1.095)  # more saves rows; the smallest that can be kept is taken
_SHORT = 32  # a segment of up to 1/32 of a rank's tokens is short
_SLACK = 0.01  # of the mean pairs: a rank this close to its target is not improved
# The price, in rows, of a token's worth of attention pairs above the limit. It exceeds what any cut saves in rows,
# because a plan beyond its tolerance is not used; it is finite so that the smallest excess wins if none is avoidable.
_STEEP = 100


class Policy(StrEnum):
    """How tokens are assigned to ranks; values of `--cp-policy`."""

    AUTO = "auto"
    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    BALANCED = "balanced"


@dataclass(frozen=True, eq=False)
class Pieces:
    """P pieces that cover every token once, by position; neighbouring pieces of a segment are on different ranks."""

    segment: Int64  # int64 [P], the segment of each piece
    # start, end: int64 [P], its tokens [start, end)
    start: Int64
    end: Int64
    rank: Int64  # int64 [P], the rank that holds each piece


def contiguous(layout: PackedLayout, cp_size: int) -> Pieces:
    """Assign the tokens [r T/cp, (r+1) T/cp) to rank r."""
    share = layout.tokens // cp_size
    return cut_at_segments(layout, np.arange(cp_size, dtype=np.int64) * share, np.arange(cp_size, dtype=np.int64))


def zigzag(layout: PackedLayout, cp_size: int) -> Pieces:
    """Assign chunks r and 2cp-1-r of 2cp to rank r; if T/cp is odd, the second one has one more token.

    With one segment of T tokens, all ranks get nearly the same number of pairs.
    """
    share = layout.tokens // cp_size
    front = share // 2
    ranks = np.arange(cp_size, dtype=np.int64)
    starts = np.concatenate([ranks * front, cp_size * front + ranks * (share - front)])
    owners = np.concatenate([ranks, ranks[::-1]])
    keep = np.append(np.diff(starts) > 0, True)
    return cut_at_segments(layout, starts[keep], owners[keep])


def cut_at_segments(layout: PackedLayout, starts: Int64, owners: Int64) -> Pieces:
    """Cut intervals that begin at `starts` (sorted, the first at 0) and belong to `owners` into pieces of segments.

    segments of 4 and 3 tokens    [0 1 2 3][4 5 6]
    starts 0 2, owners 0 1        [0 0][1 1][1 1 1]        pieces [0,2) [2,4) [4,7)
    """
    changes = np.append(True, np.diff(owners) != 0)  # join neighbours of the same owner
    starts = starts[changes]
    owners = owners[changes]
    borders = layout.cu_seqlens.astype(np.int64)
    inside = starts[borders[np.searchsorted(borders, starts)] != starts]  # these cut a segment, the others are borders
    at = np.searchsorted(borders, inside)
    start = np.insert(borders[:-1], at, inside)
    segment = np.insert(np.arange(layout.segments, dtype=np.int64), at, at - 1)
    rank = np.repeat(owners, np.diff(np.searchsorted(start, starts), append=len(start)))
    return Pieces(segment, start, np.append(start[1:], layout.tokens), rank)


class Interval(NamedTuple):
    """Tokens [low, high) of a segment, counted from its start; sorted by density, the pairs per token."""

    density: float
    length: int
    segment: int
    low: int
    high: int

    @property
    def pairs(self) -> float:
        """Attention pairs of its tokens."""
        return self.density * self.length


class Assignment:
    """Records the rank of each segment and of each part of a cut segment."""

    def __init__(self, layout: PackedLayout) -> None:
        self._layout = layout
        self._whole = np.full(layout.segments, -1, dtype=np.int64)
        self._cuts: list[tuple[int, int, int]] = []

    def give(self, rank: int, segments: Int64) -> None:
        """Assign whole segments to a rank."""
        self._whole[segments] = rank

    def cut(self, rank: int, segment: int, low: int, high: int) -> None:
        """Assign tokens [low, high) of a segment, counted from its start, to a rank."""
        if low < high:
            self._cuts.append((segment, low, rank))

    def pieces(self) -> Pieces:
        """Return all pieces, once every token is assigned; neighbours on the same rank are joined."""
        borders = self._layout.cu_seqlens.astype(np.int64)
        whole = np.flatnonzero(self._whole >= 0)
        cuts = np.array(self._cuts, dtype=np.int64).reshape(-1, 3)
        segment = np.concatenate([whole, cuts[:, 0]])
        start = np.concatenate([borders[whole], borders[cuts[:, 0]] + cuts[:, 1]])
        rank = np.concatenate([self._whole[whole], cuts[:, 2]])
        order = np.argsort(start, kind="stable")
        segment = segment[order]
        start = start[order]
        rank = rank[order]
        first = np.append(True, (np.diff(segment) != 0) | (np.diff(rank) != 0))
        start = start[first]
        return Pieces(segment[first], start, np.append(start[1:], self._layout.tokens), rank[first])


class ShortSegments:
    """Short segments, concatenated from shortest to longest; tokens are taken from both ends.

    `_tokens` and `_pairs` are running sums over the segments; [_low, _high) is the unassigned range of tokens.
    """

    def __init__(self, segments: Int64, lengths: Int64, left_window: int | None, assignment: Assignment) -> None:
        order = np.argsort(lengths.astype(np.int32), kind="stable")
        self._segments = segments[order]
        self._left_window = left_window
        self._assignment = assignment
        self._tokens: list[int] = [0, *np.cumsum(lengths[order]).tolist()]
        self._pairs: list[int] = [0, *np.cumsum(segment_pairs(lengths[order], left_window)).tolist()]
        self._low = 0
        self._high = self._tokens[-1]

    @property
    def tokens(self) -> int:
        """Remaining tokens."""
        return self._high - self._low

    def light(self, tokens: int) -> int:
        """Count the pairs of the first `tokens` tokens, from the short end."""
        return self._before(self._low + tokens) - self._before(self._low)

    def dense(self, tokens: int) -> int:
        """Count the pairs of the last `tokens` tokens, from the long end."""
        return self._before(self._high) - self._before(self._high - tokens)

    def take(self, rank: int, tokens: int, pairs: float = 0) -> int:
        """Assign `tokens` tokens from both ends to a rank, with about `pairs` pairs; return the number of their pairs.

        As many as the pairs allow are taken from the long end, rounded to whole segments: only the short end is cut,
        where segments are the cheapest to split.
        """
        fewest = bisect_left(range(tokens), True, key=lambda n: self.light(n) + self.dense(tokens - n) <= pairs)
        border = self._tokens[bisect_left(self._tokens, self._high - (tokens - fewest))]
        back = self._high - max(border, self._low)
        taken = self.light(tokens - back) + self.dense(back)
        self._give(rank, self._low, self._low + tokens - back)
        self._give(rank, self._high - back, self._high)
        self._low += tokens - back
        self._high -= back
        return taken

    def _before(self, token: int) -> int:
        """Count the pairs of all tokens before this one in the row, assigned or not."""
        index = bisect_right(self._tokens, token) - 1
        return self._pairs[index] + segment_pairs(token - self._tokens[index], self._left_window)

    def _give(self, rank: int, low: int, high: int) -> None:
        """Assign tokens [low, high) of the row: the tail of a segment, whole segments, the head of one."""
        if low == high:
            return
        first = bisect_right(self._tokens, low) - 1
        last = bisect_left(self._tokens, high) - 1
        head = low - self._tokens[first]
        tail = high - self._tokens[last]
        if first == last:
            self._assignment.cut(rank, int(self._segments[first]), head, tail)
            return
        self._assignment.cut(rank, int(self._segments[first]), head, self._tokens[first + 1] - self._tokens[first])
        self._assignment.cut(rank, int(self._segments[last]), 0, tail)
        self._assignment.give(rank, self._segments[first + 1 : last])


class _Cut(NamedTuple):
    """A way to fill a rank: tokens from both ends of an interval, or tokens from its end plus the lightest tokens."""

    price: float  # in rows moved; first, so that `min` takes the cheapest
    interval: int  # its index
    front: int
    back: int
    with_lightest: bool


class Balancer:
    """Fills one rank after the other, each with at most about `tolerance` times the mean attention pairs.

    A rank may exceed the limit if no combination of intervals fits. In the methods, `needed` is the number of tokens
    that the rank still needs and `budget` the number of pairs that it should still get; budget / needed is the ideal
    density of the next interval. Methods that assign tokens return the number of their pairs.
    """

    def __init__(self, layout: PackedLayout, cp_size: int, left_window: int | None, tolerance: float) -> None:
        self._left_window = left_window
        self._tokens_per_rank = layout.tokens // cp_size  # t
        self._rank = 0  # the current rank
        self._later = cp_size - 1  # the number of ranks after it
        self._pairs_left: float = layout.attention_pairs(left_window)  # for this rank and those after it
        self._mean = self._pairs_left / cp_size
        self._target = self._mean  # an equal share of the remaining pairs, updated for each rank
        self._limit = tolerance * self._mean
        self._assignment = Assignment(layout)
        short = layout.lengths * _SHORT <= self._tokens_per_rank
        short_segments = np.flatnonzero(short)
        intervals = np.flatnonzero(~short)
        self._short = ShortSegments(short_segments, layout.lengths[short_segments], left_window, self._assignment)
        self._intervals: list[Interval] = []  # shorter than t, sorted by density
        self._long: list[Interval] = []  # the others, sorted by density
        # small remainders of cut intervals, taken by the next rank so that they do not accumulate
        self._leftovers: list[Interval] = []
        lengths = layout.lengths[intervals].tolist()
        for interval in sorted(self._interval(s, 0, n) for s, n in zip(intervals.tolist(), lengths, strict=True)):
            self._list_of(interval).append(interval)

    def assign(self) -> Pieces:
        """Assign every token; the last rank takes the remaining t tokens."""
        while self._later:
            self._target = self._pairs_left / (self._later + 1)
            self._pairs_left -= self._fill_rank()
            self._rank += 1
            self._later -= 1
        for interval in chain(self._intervals, self._long, self._leftovers):
            self._assignment.cut(self._rank, interval.segment, interval.low, interval.high)
        self._short.take(self._rank, self._short.tokens)
        return self._assignment.pieces()

    def _fill_rank(self) -> float:
        """Fill the rank by one of the three moves, chosen by the densest interval."""
        leftovers = self._leftovers
        self._leftovers = []
        if not self._intervals:
            self._intervals = sorted(leftovers)
            leftovers = []
        if self._intervals and not self._long:
            densest = self._intervals.pop()
            needed = self._tokens_per_rank - densest.length
            if densest.pairs + self._pairs_of_lightest(needed, self._lightest(needed)) <= self._limit:
                return self._gather(densest, leftovers)
            self._intervals.append(densest)
        for leftover in leftovers:
            insort(self._intervals, leftover)
        if self._long and self._long[-1].density * self._tokens_per_rank <= self._limit:
            back = self._tokens_per_rank // 2
            return self._assign_ends(self._long.pop(), self._tokens_per_rank - back, back)
        if self._long or self._intervals:
            heaviest = (self._long or self._intervals).pop()
            return self._assign_end_with_lightest(heaviest, self._tokens_per_rank, self._limit)
        return self._short.take(self._rank, self._tokens_per_rank, self._target)

    # Heavy intervals

    def _assign_end_with_lightest(self, interval: Interval, needed: int, budget: float) -> float:
        """Assign as much of the end of an interval (already removed) as the budget allows, and the lightest tokens."""
        back = self._affordable_end(interval, needed, budget)
        needed -= back
        lightest = self._lightest(needed)  # computed before short segments are taken, which are among the lightest
        tokens = min(needed, self._short.tokens)
        pairs: float = self._short.take(self._rank, tokens)
        for light in lightest:
            self._list_of(light).remove(light)
            count = min(needed - tokens, light.length)
            tokens += count
            pairs += self._assign_ends(light, count, 0)
        front = needed - tokens  # 0 unless there are too few light tokens
        return pairs + self._assign_ends(interval, front, back)

    def _affordable_end(self, interval: Interval, needed: int, budget: float) -> int:
        """Return how many tokens of an interval's end fit the budget together with the lightest tokens."""
        light = [*self._lightest(needed), interval]
        most = min(needed, interval.length)

        def fits(less: int) -> bool:
            back = most - less
            of_end = self._pairs_between(interval.high - back, interval.high)
            return of_end + self._pairs_of_lightest(needed - back, light) <= budget

        return most - bisect_left(range(most), True, key=fits)

    def _lightest(self, needed: int) -> list[Interval]:
        """Return the lightest intervals that fill the rank after the short segments."""
        intervals = []
        tokens = self._short.tokens
        for interval in merge(self._intervals, self._long):
            if tokens >= needed:
                break
            intervals.append(interval)
            tokens += interval.length
        return intervals

    def _pairs_of_lightest(self, tokens: int, intervals: list[Interval]) -> float:
        """Count the pairs of `tokens` tokens: of the short segments, then of these intervals, from the front."""
        count = min(tokens, self._short.tokens)
        pairs = self._short.light(count)
        tokens -= count
        for interval in intervals:
            if tokens <= 0:
                break
            count = min(tokens, interval.length)
            pairs += self._pairs_between(interval.low, interval.low + count)
            tokens -= count
        return pairs

    # Intervals that fit

    def _gather(self, interval: Interval, leftovers: list[Interval]) -> float:
        """Assign this interval (already removed), leftovers that fit and more whole intervals, then fill the rank."""
        needed = self._tokens_per_rank
        budget = self._target
        for whole in (interval, *leftovers):
            if whole.length <= needed:
                needed -= whole.length
                budget -= self._assign_ends(whole, whole.length, 0)
            else:
                insort(self._intervals, whole)
        while needed:
            index = self._next_whole_interval(needed, budget)
            if index is None:
                return self._target - budget + self._fill_rest_of_rank(needed, budget)
            interval = self._intervals.pop(index)
            needed -= interval.length
            budget -= self._assign_ends(interval, interval.length, 0)
        return self._target - budget

    def _next_whole_interval(self, needed: int, budget: float) -> int | None:
        """Return the index of the interval to assign whole.

        It is slightly denser than budget / needed if possible, else lighter. None if no interval leaves a rest that can
        be filled well, or if short segments alone fill the rank well.
        """
        denser = self._denser_interval(needed, budget)
        if denser is not None or self._short_segments_suffice(needed, budget):
            return denser
        suiting = bisect_left(self._intervals, (budget / needed,))
        # An uncut segment from here on has more tokens than needed, so it is not tried.
        too_long = bisect_left(self._intervals, (self._pairs_between(0, needed + 1) / (needed + 1),))
        for index in reversed(range(min(suiting, too_long))):
            interval = self._intervals[index]
            if interval.length <= needed:  # the densest of the lighter ones; the rest needs denser tokens
                missing = needed - interval.length
                remaining = budget - interval.pairs
                fits = (
                    suiting == len(self._intervals) or not missing or self._short_segments_suffice(missing, remaining)
                )
                if fits or self._denser_interval(missing, remaining) is not None:
                    return index
                break
        return None

    def _denser_interval(self, needed: int, budget: float) -> int | None:
        """Return the lightest interval denser than budget / needed that, with the lightest rest, fits the budget."""
        first = bisect_left(self._intervals, (budget / needed,))
        for index in range(first, min(first + 8, len(self._intervals))):
            interval = self._intervals[index]
            if interval.length <= needed:
                missing = needed - interval.length
                short = min(missing, self._short.tokens)
                lightest = self._short.light(short) + (missing - short) * self._intervals[0].density
                if interval.pairs + lightest <= budget + _SLACK * self._mean:
                    return index
                break
        return None

    def _short_segments_suffice(self, needed: int, budget: float) -> bool:
        """Return whether short segments can fill the rank with about `budget` pairs."""
        if self._short.tokens < needed:
            return False
        slack = _SLACK * self._mean
        return self._short.light(needed) - slack <= budget <= self._short.dense(needed) + slack

    # The end of a rank

    def _fill_rest_of_rank(self, needed: int, budget: float) -> float:
        """Fill the rank at the lowest price: short segments, one interval, or one's end and the lightest tokens."""
        if not self._intervals or self._short_segments_suffice(needed, budget):
            return self._short.take(self._rank, needed, budget)
        cut = min(chain(self._cuts_at_both_ends(needed, budget), self._cuts_with_lightest(needed, budget)))
        interval = self._intervals.pop(cut.interval)
        if cut.with_lightest:
            return self._assign_end_with_lightest(interval, needed, budget)
        return self._assign_ends(interval, cut.front, cut.back)

    def _cuts_at_both_ends(self, needed: int, budget: float) -> Iterator[_Cut]:
        """Yield cuts of a few intervals: 0, 1/8, ... 8/8 of the needed tokens from the back, the rest from the front.

        Candidates: intervals about as dense as budget / needed, about as long as needed (an uncut segment of n tokens
        has density n/2), the lightest and the densest ones.
        """
        size = len(self._intervals)
        near = (bisect_left(self._intervals, (budget / needed,)), bisect_left(self._intervals, (needed / 2,)), 0, size)
        indices = {i for n in near for i in range(max(n - 2, 0), min(n + 3, size))}
        # try only one of several intervals with the same density and length
        different = {self._intervals[i][:2]: i for i in indices if self._intervals[i].length >= needed}
        for index, back in product(different.values(), {needed * eighth // 8 for eighth in range(9)}):
            interval = self._intervals[index]
            front = needed - back
            middle = interval.length - needed
            taken = self._pairs_of_ends(interval, front, back)
            rows = interval.low  # this rank fetches what precedes its front
            if back:  # and what lies between its ends
                rows += middle
            if middle:  # the owner of the middle fetches all before it
                rows += interval.low + front
            yield _Cut(rows + self._penalty(budget, taken, middle, interval.pairs - taken), index, front, back, False)

    def _cuts_with_lightest(self, needed: int, budget: float) -> Iterator[_Cut]:
        """Yield cuts of two intervals' ends with the lightest tokens: one of ideal density, one denser."""
        last = len(self._intervals) - 1
        suiting = bisect_left(self._intervals, (budget / needed,), 0, last)
        denser = bisect_left(self._intervals, ((budget / needed + needed / 2) / 2,), 0, last)
        for index in {suiting, denser}:
            interval = self._intervals.pop(index)  # it cannot be combined with itself
            back = self._affordable_end(interval, needed, budget)
            front = needed - back
            lightest = self._lightest(front)
            of_lightest = self._pairs_of_lightest(front, [*lightest, interval])
            taken = of_lightest + self._pairs_between(interval.high - back, interval.high)
            rows = interval.high - back
            missing = front - self._short.tokens
            for light in lightest:
                rows += light.low  # what precedes it
                if light.length > missing:  # it is cut, and its remainder will fetch what precedes the remainder
                    rows += light.low + missing
                missing -= light.length
            self._intervals.insert(index, interval)
            yield _Cut(rows + self._penalty(budget, taken, 0, 0), index, 0, back, True)

    def _penalty(self, budget: float, taken: float, remaining: int, remaining_pairs: float) -> float:
        """Return the price, in rows, of the pairs above the limit that a cut causes.

        The rank should still get `budget` pairs and gets `taken`. The interval keeps `remaining` tokens with
        `remaining_pairs` pairs.
        """
        after = self._pairs_left - (self._target - budget + taken)  # for the later ranks
        # The later ranks' mean must stay below the limit, by a margin that grows with their number.
        limit = self._mean + (self._limit - self._mean) / self._later**0.5
        over = max(self._target - budget + taken - self._limit, 0) + max(after / self._later - limit, 0) * self._later
        if remaining:
            # A later rank takes the rest of the interval, at most t tokens of it, and fills up with average tokens.
            around = (after - remaining_pairs) / max(self._later * self._tokens_per_rank - remaining, 1)
            share = min(1.0, self._tokens_per_rank / remaining)
            dense = remaining_pairs * share + max(self._tokens_per_rank - remaining, 0) * around
            over += max(dense - self._limit, 0)
        price: float = _STEEP * over * self._tokens_per_rank / self._mean
        return price

    # Bookkeeping

    def _assign_ends(self, interval: Interval, front: int, back: int) -> float:
        """Assign both ends of a removed interval to the rank; the rest goes back to the others."""
        self._assignment.cut(self._rank, interval.segment, interval.low, interval.low + front)
        self._assignment.cut(self._rank, interval.segment, interval.high - back, interval.high)
        if front + back < interval.length:
            remainder = self._interval(interval.segment, interval.low + front, interval.high - back)
            if remainder.low and remainder.length * _SHORT <= self._tokens_per_rank:
                self._leftovers.append(remainder)
            else:
                insort(self._list_of(remainder), remainder)
        return self._pairs_of_ends(interval, front, back)

    def _list_of(self, interval: Interval) -> list[Interval]:
        if interval.length < self._tokens_per_rank:
            return self._intervals
        return self._long

    def _interval(self, segment: int, low: int, high: int) -> Interval:
        return Interval(self._pairs_between(low, high) / (high - low), high - low, segment, low, high)

    def _pairs_of_ends(self, interval: Interval, front: int, back: int) -> int:
        of_front = self._pairs_between(interval.low, interval.low + front)
        return of_front + self._pairs_between(interval.high - back, interval.high)

    def _pairs_between(self, low: int, high: int) -> int:
        return segment_pairs(high, self._left_window) - segment_pairs(low, self._left_window)
