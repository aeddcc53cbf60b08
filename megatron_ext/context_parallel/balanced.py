"""The `balanced` assignment: equal tokens, attention pairs evened out, few rows moved.

Ranks are filled one after the other, the heaviest segments first. A rank has room for C = T/cp tokens and may
take up to `tolerance` times the mean attention pairs. What is left of a segment is always one interval of it
(a *stone*); its density is its pairs per token. Three moves, from the heaviest stones to the lightest:

    heavy      too many pairs for a rank: one rank takes its end, and the lightest tokens there are beside it
               [. . . . . . . . . . . . 0 0 0 0]        what is left is a shorter segment
    long       C tokens or more, of bearable density: each rank takes C tokens from both ends, a zigzag
               [0 0 1 1 2 2 . . . . 2 2 1 1 0 0]        what is left keeps its density
    the rest   whole stones, chosen so that tokens and pairs run out together; then one cut fills the rank
               [0 0 0 0] [0 0 0] [0 0 . . . 0 0]        cut where it moves few rows and leaves no heavy rest

So one segment over the whole row becomes a zigzag, and documents stay whole but for about one per rank.
Segments of up to C/32 tokens are not looked at one by one: they are *sand*, sorted by length, and a rank takes
a run of it from either end. That bounds the work by the number of ranks, whatever the number of segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_ext.context_parallel.assignment import Pieces
from megatron_ext.context_parallel.shares import Ledger, Sand, Stone, Taken
from megatron_ext.layout import PackedLayout, segment_pairs

TOLERANCES = (1.03, 1.05, 1.065, 1.08, 1.095)  # more saves rows; the smallest that can be kept is taken
_SAND = 32  # a segment of 1/32 of a rank's tokens is sand
_SLACK = 0.01  # of the mean pairs: a rank this close to its aim is not improved
_STEEP = 100  # rows for each token's worth of attention pairs that a rank has too many


class _Cut(NamedTuple):
    """A way to fill a rank: so many tokens from both ends of a stone, or its end beside the lightest tokens."""

    price: float
    stone: int  # its index
    front: int
    back: int
    beside_light: bool


def balanced(layout: PackedLayout, cp_size: int, reach: int | None, tolerance: float) -> Pieces:
    """Deal the tokens out so that the slowest rank has about `tolerance` times the mean attention pairs at most.

    It is an aim, not a promise: where stones do not go together, a rank may have more.
    """
    return _Dealer(layout, cp_size, reach, tolerance).deal()


class _Dealer:
    """Fills one rank after the other."""

    def __init__(self, layout: PackedLayout, cp_size: int, reach: int | None, tolerance: float) -> None:
        self._reach = reach
        self._room = layout.tokens // cp_size
        self._rank, self._later = 0, cp_size - 1
        self._pairs_left: float = layout.attention_pairs(reach)
        self._mean = self._pairs_left / cp_size
        self._cap = tolerance * self._mean
        self._ledger = Ledger(layout)
        short = layout.lengths * _SAND <= self._room
        sand, stones = np.flatnonzero(short), np.flatnonzero(~short)
        self._sand = Sand(sand, layout.lengths[sand], reach, self._ledger)
        self._stones: list[Stone] = []  # shorter than the room, sorted by density
        self._long: list[Stone] = []  # the others
        self._crumbs: list[Stone] = []  # small rests of cut stones, for the next rank: one rank is not to get all
        lengths = layout.lengths[stones].tolist()
        for stone in sorted(self._stone(*found) for found in zip(stones.tolist(), lengths, strict=True)):
            self._heap_of(stone).append(stone)

    def deal(self) -> Pieces:
        """Give every token to a rank."""
        while self._later:
            self._aim = self._pairs_left / (self._later + 1)
            self._pairs_left -= self._fill()
            self._rank, self._later = self._rank + 1, self._later - 1
        for stone in chain(self._stones, self._long, self._crumbs):
            self._ledger.cut(self._rank, stone.segment, stone.low, stone.high)
        self._sand.take(self._rank, self._sand.tokens)
        return self._ledger.pieces()

    def _fill(self) -> float:
        """Fill one rank; returns its pairs."""
        crumbs, self._crumbs = self._crumbs, []
        if not self._stones:
            self._stones, crumbs = sorted(crumbs), []
        if not self._long and self._stones and self._bearable():
            return self._gather(self._stones.pop(), crumbs)
        for crumb in crumbs:
            insort(self._stones, crumb)
        if self._long and self._long[-1].density * self._room <= self._cap:
            return self._cut(self._long.pop(), self._room - self._room // 2, self._room // 2)
        if self._long or self._stones:
            return self._end_beside_light((self._long or self._stones).pop(), self._room, self._cap)
        return self._sand.take(self._rank, self._room, self._aim).pairs

    def _bearable(self) -> bool:
        """Whether the heaviest stone and the lightest tokens fit on one rank."""
        stone = self._stones.pop()
        rest = self._room - stone.length
        pairs = stone.pairs + self._light(rest, self._lightest(rest))
        self._stones.append(stone)
        return pairs <= self._cap

    # Heavy stones

    def _end_beside_light(self, stone: Stone, room: int, pairs: float) -> float:
        """As much of the end of a stone (taken out already) as fits, by pairs, beside the lightest tokens."""
        back = self._back_beside_light(stone, room, pairs)
        light = self._take_light(room - back)
        return light.pairs + self._cut(stone, room - back - light.tokens, back)

    def _back_beside_light(self, stone: Stone, room: int, pairs: float) -> int:
        light = [*self._lightest(room), stone]
        low, high = 0, min(room, stone.length)
        while low < high:
            middle = (low + high + 1) // 2
            if self._between(stone.high - middle, stone.high) + self._light(room - middle, light) <= pairs:
                low = middle
            else:
                high = middle - 1
        return low

    def _lightest(self, room: int) -> list[Stone]:
        """The lightest stones that, after the sand, fill the room."""
        found, tokens = [], self._sand.tokens
        for stone in sorted(self._stones + self._long) if self._long else self._stones:
            if tokens >= room:
                break
            found.append(stone)
            tokens += stone.length
        return found

    def _light(self, tokens: int, stones: list[Stone]) -> float:
        """Pairs of so many tokens of the sand and then of these stones, each from its front."""
        some = min(tokens, self._sand.tokens)
        pairs, tokens = self._sand.light(some), tokens - some
        for stone in stones:
            if tokens <= 0:
                break
            some = min(tokens, stone.length)
            pairs, tokens = pairs + self._between(stone.low, stone.low + some), tokens - some
        return pairs

    def _take_light(self, room: int) -> Taken:
        """Give the rank the lightest tokens, as many as there are."""
        stones = self._lightest(room)
        tokens, pairs = self._sand.take(self._rank, min(room, self._sand.tokens))
        for stone in stones:
            self._heap_of(stone).remove(stone)
            some = min(room - tokens, stone.length)
            tokens, pairs = tokens + some, pairs + self._cut(stone, some, 0)
        return Taken(tokens, pairs)

    # Stones that fit

    def _gather(self, stone: Stone, crumbs: list[Stone]) -> float:
        """Whole stones whose tokens and pairs run out together, then sand or one cut."""
        room, pairs = self._room - stone.length, self._aim - self._cut(stone, stone.length, 0)
        for crumb in crumbs:
            if crumb.length <= room:
                room, pairs = room - crumb.length, pairs - self._cut(crumb, crumb.length, 0)
            else:
                insort(self._stones, crumb)
        while room:
            index = self._whole(room, pairs)
            if index is None:
                return self._aim - pairs + self._finish(room, pairs)
            stone = self._stones.pop(index)
            room, pairs = room - stone.length, pairs - self._cut(stone, stone.length, 0)
        return self._aim - pairs

    def _whole(self, room: int, pairs: float) -> int | None:
        """The stone to give next: a little denser than the room left if possible, then lighter; None to finish."""
        above = self._above(room, pairs)
        if above is not None or self._sand_fits(room, pairs):
            return above
        middle = bisect_left(self._stones, (pairs / room,))
        fitting = bisect_left(self._stones, (self._between(0, room + 1) / (room + 1),))
        for index in reversed(range(min(middle, fitting))):
            stone = self._stones[index]
            if stone.length <= room:
                rest, wanted = room - stone.length, pairs - stone.pairs
                last = middle == len(self._stones) or not rest
                good = last or self._sand_fits(rest, wanted) or self._above(rest, wanted) is not None
                return index if good else None
        return None

    def _above(self, room: int, pairs: float) -> int | None:
        """The lightest stone that fits and is denser than the room left, if what is left stays feasible."""
        first = bisect_left(self._stones, (pairs / room,))
        for index in range(first, min(first + 8, len(self._stones))):
            stone = self._stones[index]
            if stone.length <= room:
                some = min(room - stone.length, self._sand.tokens)
                rest = self._sand.light(some) + (room - stone.length - some) * self._stones[0].density
                return index if stone.pairs + rest <= pairs + _SLACK * self._mean else None
        return None

    def _sand_fits(self, room: int, pairs: float) -> bool:
        if self._sand.tokens < room:
            return False
        slack = _SLACK * self._mean
        return self._sand.light(room) - slack <= pairs <= self._sand.dense(room) + slack

    # The end of a rank

    def _finish(self, room: int, pairs: float) -> float:
        """Fill the room with sand, from one stone, or from a stone's end and the lightest tokens; returns the pairs."""
        if not self._stones or self._sand_fits(room, pairs):
            return self._sand.take(self._rank, room, pairs).pairs
        cut = min(chain(self._cuts_at_both_ends(room, pairs), self._cuts_beside_light(room, pairs)))
        stone = self._stones.pop(cut.stone)
        if cut.beside_light:
            return self._end_beside_light(stone, room, pairs)
        return self._cut(stone, cut.front, cut.back)

    def _cuts_at_both_ends(self, room: int, pairs: float) -> list[_Cut]:
        size = len(self._stones)
        near = (bisect_left(self._stones, (pairs / room,)), bisect_left(self._stones, (room / 2,)), 0, size)
        indices = {i for n in near for i in range(max(n - 2, 0), min(n + 3, size))}
        different = {self._stones[i][:2]: i for i in indices if self._stones[i].length >= room}
        backs = {room * eighth // 8 for eighth in range(9)}
        return [self._cut_at_both_ends(i, room - back, back, pairs) for i in different.values() for back in backs]

    def _cut_at_both_ends(self, index: int, front: int, back: int, pairs: float) -> _Cut:
        stone = self._stones[index]
        left, taken = stone.length - front - back, self._ends(stone, front, back)
        rows = stone.low + (left if back else 0) + (stone.low + front if left else 0)
        price = rows + self._penalty(pairs, taken, left, stone.pairs - taken)
        return _Cut(price, index, front, back, False)

    def _cuts_beside_light(self, room: int, pairs: float) -> list[_Cut]:
        last = len(self._stones) - 1
        denser = bisect_left(self._stones, (pairs / room,), 0, last)
        longer = bisect_left(self._stones, ((pairs / room + room / 2) / 2,), 0, last)
        return [self._cut_beside_light(index, room, pairs) for index in {denser, longer}]

    def _cut_beside_light(self, index: int, room: int, pairs: float) -> _Cut:
        stone = self._stones.pop(index)
        back = self._back_beside_light(stone, room, pairs)
        light, rest = self._lightest(room - back), room - back - self._sand.tokens
        taken = self._between(stone.high - back, stone.high) + self._light(room - back, [*light, stone])
        rows = stone.high - back
        for other in light:
            rows += other.low + (other.low + rest if other.length > rest else 0)
            rest -= other.length
        self._stones.insert(index, stone)
        return _Cut(rows + self._penalty(pairs, taken, 0, 0), index, 0, back, True)

    def _penalty(self, wanted: float, taken: float, left: int, left_pairs: float) -> float:
        """The price, in rows, of too many pairs: on this rank, around what is left of a stone, on later ranks."""
        after = self._pairs_left - (self._aim - wanted + taken)
        limit = self._mean + (self._cap - self._mean) / self._later**0.5
        over = max(self._aim - wanted + taken - self._cap, 0) + max(after / self._later - limit, 0) * self._later
        if left:
            around = (after - left_pairs) / max(self._later * self._room - left, 1)
            dense = left_pairs * min(1.0, self._room / left) + max(self._room - left, 0) * around
            over += max(dense - self._cap, 0)
        price: float = _STEEP * over * self._room / self._mean
        return price

    # Bookkeeping

    def _cut(self, stone: Stone, front: int, back: int) -> float:
        """Give the rank both ends of a stone that was taken out; what is left goes back. Returns the pairs."""
        self._ledger.cut(self._rank, stone.segment, stone.low, stone.low + front)
        self._ledger.cut(self._rank, stone.segment, stone.high - back, stone.high)
        if front + back < stone.length:
            rest = self._stone(stone.segment, stone.high - back, stone.low + front)
            if rest.low and rest.length * _SAND <= self._room:
                self._crumbs.append(rest)
            else:
                insort(self._heap_of(rest), rest)
        return self._ends(stone, front, back)

    def _heap_of(self, stone: Stone) -> list[Stone]:
        return self._stones if stone.length < self._room else self._long

    def _stone(self, segment: int, high: int, low: int = 0) -> Stone:
        return Stone(self._between(low, high) / (high - low), high - low, segment, low, high)

    def _ends(self, stone: Stone, front: int, back: int) -> int:
        return self._between(stone.low, stone.low + front) + self._between(stone.high - back, stone.high)

    def _between(self, low: int, high: int) -> int:
        return segment_pairs(high, self._reach) - segment_pairs(low, self._reach)
