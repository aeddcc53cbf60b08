"""The `balanced` assignment: equal tokens, attention pairs evened out, few rows moved.

Ranks are filled one after the other, the heaviest segments first. A rank has room for t = T/cp tokens and may
take up to `tolerance` times the mean attention pairs. What is left of a segment is always one interval of it
(a *stone*); its density is its pairs per token. Three moves, from the heaviest stones to the lightest:

    heavy      too many pairs for a rank: one rank takes its end, and the lightest tokens there are beside it
               [. . . . . . . . . . . . 0 0 0 0]        what is left is a shorter segment
    long       t tokens or more, of bearable density: each rank takes t tokens from both ends, a zigzag
               [0 0 1 1 2 2 . . . . 2 2 1 1 0 0]        what is left keeps its density
    the rest   whole stones, chosen so that tokens and pairs run out together; then one cut fills the rank
               [0 0 0 0] [0 0 0] [0 0 . . . 0 0]        cut where it moves few rows and leaves no heavy rest

So one segment over the whole row becomes a zigzag, and documents stay whole but for about one per rank.
Segments of up to t/32 tokens are not looked at one by one: they are *sand*, sorted by length, and a rank takes
a run of it from either end. That bounds the work by the number of ranks, whatever the number of segments.

A trace: segments a, b, c, d of 11, 10, 9, 2 tokens on 4 ranks. t = 8; the mean is 42 pairs, and 46 is the cap at a
tolerance of 1.1. An uncut segment of n tokens has a density of (n+1)/2 pairs per token.

    rank 0   a is the densest, and 8 tokens of it have 6.0 x 8 = 48 pairs: heavy. 4 tokens of its end (38 pairs) go
             beside the lightest: d (3) and 2 tokens of the front of c (3); 44 pairs
    rank 1   b is long, and bearable: 5.5 x 8 = 44 pairs. 4 tokens from its front, 4 from its back
    rank 2   nothing is long any more. What is left of c, 7 tokens of density 6.0, fits whole (42); one token is cut
             from the front of a (1); 43 pairs
    rank 3   takes what is left, 6 tokens of a and 2 of b; 38 pairs

    a  2 3 3 3 3 3 3 0 0 0 0      b  1 1 1 1 3 3 1 1 1 1      c  0 0 2 2 2 2 2 2 2      d  0 0
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from megatron_ext.context_parallel.assignment import Pieces
from megatron_ext.context_parallel.shares import Ledger, Sand, Stone
from megatron_ext.layout import PackedLayout, segment_pairs

TOLERANCES = (1.03, 1.05, 1.065, 1.08, 1.095)  # more saves rows; the smallest that can be kept is taken
_SAND = 32  # a segment of 1/32 of a rank's tokens is sand
_SLACK = 0.01  # of the mean pairs: a rank this close to its aim is not improved
_STEEP = 100  # rows for each token's worth of attention pairs that a rank has too many


class _Cut(NamedTuple):
    """Fills a rank in one way: so many tokens from both ends of a stone, or its end beside the lightest tokens."""

    price: float  # in rows moved; first, so that `min` takes the cheapest
    stone: int  # its index
    front: int
    back: int
    beside_lightest: bool


def balanced(layout: PackedLayout, cp_size: int, reach: int | None, tolerance: float) -> Pieces:
    """Deal the tokens out so that the slowest rank has about `tolerance` times the mean attention pairs at most.

    It is an aim, not a promise: where stones do not go together, a rank may have more.
    """
    return _Dealer(layout, cp_size, reach, tolerance).deal()


class _Dealer:
    """Fills one rank after the other.

    In the methods, `room` is the tokens that the rank can still take and `budget` the pairs that it should still get;
    budget / room is the density that the next stone would best have. Methods that give return the pairs given.
    """

    def __init__(self, layout: PackedLayout, cp_size: int, reach: int | None, tolerance: float) -> None:
        self._reach = reach
        self._room = layout.tokens // cp_size  # t
        self._rank, self._later = 0, cp_size - 1  # the rank that is filled, and how many come after it
        self._pairs_left: float = layout.attention_pairs(reach)  # of this rank and those after it
        self._mean = self._pairs_left / cp_size
        self._aim = self._mean  # an even part of the pairs left, anew for each rank
        self._cap = tolerance * self._mean
        self._ledger = Ledger(layout)
        short = layout.lengths * _SAND <= self._room
        sand, stones = np.flatnonzero(short), np.flatnonzero(~short)
        self._sand = Sand(sand, layout.lengths[sand], reach, self._ledger)
        self._stones: list[Stone] = []  # shorter than t, sorted by density
        self._long: list[Stone] = []  # the others, sorted by density
        self._crumbs: list[Stone] = []  # small rests of cut stones, for the next rank: one rank is not to get all
        lengths = layout.lengths[stones].tolist()
        for stone in sorted(self._stone(s, 0, n) for s, n in zip(stones.tolist(), lengths, strict=True)):
            self._list_of(stone).append(stone)

    def deal(self) -> Pieces:
        """Give every token to a rank; the last one takes what is left, which is t tokens again."""
        while self._later:
            self._aim = self._pairs_left / (self._later + 1)
            self._pairs_left -= self._fill_rank()
            self._rank, self._later = self._rank + 1, self._later - 1
        for stone in chain(self._stones, self._long, self._crumbs):
            self._ledger.cut(self._rank, stone.segment, stone.low, stone.high)
        self._sand.take(self._rank, self._sand.tokens)
        return self._ledger.pieces()

    def _fill_rank(self) -> float:
        """Choose one of the three moves by the densest stone, and fill the rank with it."""
        crumbs, self._crumbs = self._crumbs, []
        if not self._stones:
            self._stones, crumbs = sorted(crumbs), []
        if self._stones and not self._long:
            densest = self._stones.pop()
            rest = self._room - densest.length
            if densest.pairs + self._pairs_of_lightest(rest, self._lightest(rest)) <= self._cap:
                return self._gather(densest, crumbs)
            self._stones.append(densest)
        for crumb in crumbs:
            insort(self._stones, crumb)
        if self._long and self._long[-1].density * self._room <= self._cap:
            return self._give_ends(self._long.pop(), self._room - self._room // 2, self._room // 2)
        if self._long or self._stones:
            return self._give_end_beside_lightest((self._long or self._stones).pop(), self._room, self._cap)
        return self._sand.take(self._rank, self._room, self._aim).pairs

    # Heavy stones

    def _give_end_beside_lightest(self, stone: Stone, room: int, budget: float) -> float:
        """Give as much of the end of a stone (taken out already) as the budget bears beside the lightest tokens."""
        back = self._bearable_end(stone, room, budget)
        room -= back
        lightest = self._lightest(room)  # before the sand goes, which counts among the lightest
        tokens, pairs = self._sand.take(self._rank, min(room, self._sand.tokens))
        for light in lightest:
            self._list_of(light).remove(light)
            some = min(room - tokens, light.length)
            tokens, pairs = tokens + some, pairs + self._give_ends(light, some, 0)
        return pairs + self._give_ends(stone, room - tokens, back)  # its front too, where the lightest are too few

    def _bearable_end(self, stone: Stone, room: int, budget: float) -> int:
        """Find by bisection how many tokens of a stone's end go, within the budget, beside the lightest tokens."""
        light = [*self._lightest(room), stone]
        low, high = 0, min(room, stone.length)
        while low < high:
            middle = (low + high + 1) // 2
            pairs = self._pairs_between(stone.high - middle, stone.high) + self._pairs_of_lightest(room - middle, light)
            if pairs <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def _lightest(self, room: int) -> list[Stone]:
        """List the lightest stones that, after the sand, fill the room."""
        stones, tokens = [], self._sand.tokens
        for stone in sorted(self._stones + self._long) if self._long else self._stones:
            if tokens >= room:
                break
            stones.append(stone)
            tokens += stone.length
        return stones

    def _pairs_of_lightest(self, tokens: int, stones: list[Stone]) -> float:
        """Count the pairs of so many tokens of the sand and then of these stones, each from its front."""
        some = min(tokens, self._sand.tokens)
        pairs, tokens = self._sand.light(some), tokens - some
        for stone in stones:
            if tokens <= 0:
                break
            some = min(tokens, stone.length)
            pairs, tokens = pairs + self._pairs_between(stone.low, stone.low + some), tokens - some
        return pairs

    # Stones that fit

    def _gather(self, stone: Stone, crumbs: list[Stone]) -> float:
        """Give this stone (taken out already), then whole ones while tokens and pairs run out together, then fill up.

        The crumbs go first: the rank after the one that made them takes what fits, so that they do not gather.
        """
        room, budget = self._room - stone.length, self._aim - self._give_ends(stone, stone.length, 0)
        for crumb in crumbs:
            if crumb.length <= room:
                room, budget = room - crumb.length, budget - self._give_ends(crumb, crumb.length, 0)
            else:
                insort(self._stones, crumb)
        while room:
            index = self._next_whole_stone(room, budget)
            if index is None:
                return self._aim - budget + self._fill_rest_of_rank(room, budget)
            stone = self._stones.pop(index)
            room, budget = room - stone.length, budget - self._give_ends(stone, stone.length, 0)
        return self._aim - budget

    def _next_whole_stone(self, room: int, budget: float) -> int | None:
        """Choose the stone to give whole: a little denser than budget / room if possible, else a lighter one.

        Returns:
            Its index; None where no stone leaves a rest that can be filled well, or sand alone fills it well.
        """
        denser = self._denser_stone(room, budget)
        if denser is not None or self._sand_suffices(room, budget):
            return denser
        suiting = bisect_left(self._stones, (budget / room,))
        # From here on an uncut segment has more tokens than the room: it need not be tried.
        too_long = bisect_left(self._stones, (self._pairs_between(0, room + 1) / (room + 1),))
        for index in reversed(range(min(suiting, too_long))):
            stone = self._stones[index]
            if stone.length <= room:  # the densest of the lighter ones; it leaves a rest that wants denser tokens
                rest, wanted = room - stone.length, budget - stone.pairs
                last = suiting == len(self._stones) or not rest
                fits = last or self._sand_suffices(rest, wanted) or self._denser_stone(rest, wanted) is not None
                return index if fits else None
        return None

    def _denser_stone(self, room: int, budget: float) -> int | None:
        """Find the lightest stone that is denser than budget / room, if the budget bears it and the lightest rest."""
        first = bisect_left(self._stones, (budget / room,))
        for index in range(first, min(first + 8, len(self._stones))):
            stone = self._stones[index]
            if stone.length <= room:
                some = min(room - stone.length, self._sand.tokens)
                rest = self._sand.light(some) + (room - stone.length - some) * self._stones[0].density
                return index if stone.pairs + rest <= budget + _SLACK * self._mean else None
        return None

    def _sand_suffices(self, room: int, budget: float) -> bool:
        """Tell whether sand can fill the room, and the budget lies between its lightest and its densest tokens."""
        if self._sand.tokens < room:
            return False
        slack = _SLACK * self._mean
        return self._sand.light(room) - slack <= budget <= self._sand.dense(room) + slack

    # The end of a rank

    def _fill_rest_of_rank(self, room: int, budget: float) -> float:
        """Fill the room with sand, from one stone, or from a stone's end and the lightest tokens: the cheapest."""
        if not self._stones or self._sand_suffices(room, budget):
            return self._sand.take(self._rank, room, budget).pairs
        cut = min(chain(self._cuts_at_both_ends(room, budget), self._cuts_beside_lightest(room, budget)))
        stone = self._stones.pop(cut.stone)
        if cut.beside_lightest:
            return self._give_end_beside_lightest(stone, room, budget)
        return self._give_ends(stone, cut.front, cut.back)

    def _cuts_at_both_ends(self, room: int, budget: float) -> Iterator[_Cut]:
        """Price cuts of a few stones, with 0, 1/8, ... 8/8 of the room taken from the back and the rest from the front.

        Tried are stones about as dense as budget / room, those about as long as the room (an uncut segment of n
        tokens has the density n/2), the lightest and the densest ones.
        """
        size = len(self._stones)
        near = (bisect_left(self._stones, (budget / room,)), bisect_left(self._stones, (room / 2,)), 0, size)
        indices = {i for n in near for i in range(max(n - 2, 0), min(n + 3, size))}
        # one of those with the same density and length stands for all
        different = {self._stones[i][:2]: i for i in indices if self._stones[i].length >= room}
        for index, back in product(different.values(), {room * eighth // 8 for eighth in range(9)}):
            stone, front = self._stones[index], room - back
            left, taken = stone.length - room, self._pairs_of_ends(stone, front, back)
            # this rank fetches what lies before its front and between its ends; who gets what is left, all before it
            rows = stone.low + (left if back else 0) + (stone.low + front if left else 0)
            yield _Cut(rows + self._penalty(budget, taken, left, stone.pairs - taken), index, front, back, False)

    def _cuts_beside_lightest(self, room: int, budget: float) -> Iterator[_Cut]:
        """Price the ends of two stones, each beside the lightest tokens: one that suits alone, one half denser."""
        last = len(self._stones) - 1
        suiting = bisect_left(self._stones, (budget / room,), 0, last)
        denser = bisect_left(self._stones, ((budget / room + room / 2) / 2,), 0, last)
        for index in {suiting, denser}:
            stone = self._stones.pop(index)  # it is not to stand beside itself
            back = self._bearable_end(stone, room, budget)
            light, rest = self._lightest(room - back), room - back - self._sand.tokens
            of_lightest = self._pairs_of_lightest(room - back, [*light, stone])
            taken = of_lightest + self._pairs_between(stone.high - back, stone.high)
            rows = stone.high - back
            for other in light:  # what lies before it, and of one that is cut, what its rest will fetch
                rows += other.low + (other.low + rest if other.length > rest else 0)
                rest -= other.length
            self._stones.insert(index, stone)
            yield _Cut(rows + self._penalty(budget, taken, 0, 0), index, 0, back, True)

    def _penalty(self, budget: float, taken: float, left: int, left_pairs: float) -> float:
        """Price, in rows, the pairs above the cap that a cut brings about.

        Args:
            budget, taken: pairs that the rank should still get, and those that it gets.
            left, left_pairs: tokens and pairs of what is left of the cut stone.
        """
        after = self._pairs_left - (self._aim - budget + taken)  # for the ranks that come later
        # The later ranks' mean must stay below the cap, and the further the more of them there are to even out.
        limit = self._mean + (self._cap - self._mean) / self._later**0.5
        over = max(self._aim - budget + taken - self._cap, 0) + max(after / self._later - limit, 0) * self._later
        if left:
            # A later rank takes what is left of the stone, t tokens of it at most, and fills up with average tokens.
            around = (after - left_pairs) / max(self._later * self._room - left, 1)
            dense = left_pairs * min(1.0, self._room / left) + max(self._room - left, 0) * around
            over += max(dense - self._cap, 0)
        price: float = _STEEP * over * self._room / self._mean
        return price

    # Bookkeeping

    def _give_ends(self, stone: Stone, front: int, back: int) -> float:
        """Give the rank both ends of a stone that was taken out; what is left goes back to the others."""
        self._ledger.cut(self._rank, stone.segment, stone.low, stone.low + front)
        self._ledger.cut(self._rank, stone.segment, stone.high - back, stone.high)
        if front + back < stone.length:
            rest = self._stone(stone.segment, stone.low + front, stone.high - back)
            if rest.low and rest.length * _SAND <= self._room:
                self._crumbs.append(rest)
            else:
                insort(self._list_of(rest), rest)
        return self._pairs_of_ends(stone, front, back)

    def _list_of(self, stone: Stone) -> list[Stone]:
        return self._stones if stone.length < self._room else self._long

    def _stone(self, segment: int, low: int, high: int) -> Stone:
        return Stone(self._pairs_between(low, high) / (high - low), high - low, segment, low, high)

    def _pairs_of_ends(self, stone: Stone, front: int, back: int) -> int:
        return self._pairs_between(stone.low, stone.low + front) + self._pairs_between(stone.high - back, stone.high)

    def _pairs_between(self, low: int, high: int) -> int:
        return segment_pairs(high, self._reach) - segment_pairs(low, self._reach)
