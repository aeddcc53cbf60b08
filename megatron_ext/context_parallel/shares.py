"""Data structures of the `balanced` assignment: intervals, short segments, and the assignment so far."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.context_parallel.assignment import Pieces
from megatron_ext.layout import PackedLayout, segment_pairs


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
        segment, start, rank = segment[order], start[order], rank[order]
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
        self._low, self._high = 0, self._tokens[-1]

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
        low, high = 0, tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.light(tokens - middle) + self.dense(middle) <= pairs:
                low = middle
            else:
                high = middle - 1
        border = self._tokens[bisect_left(self._tokens, self._high - low)]
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
        first, last = bisect_right(self._tokens, low) - 1, bisect_left(self._tokens, high) - 1
        head, tail = low - self._tokens[first], high - self._tokens[last]
        if first == last:
            self._assignment.cut(rank, int(self._segments[first]), head, tail)
            return
        self._assignment.cut(rank, int(self._segments[first]), head, self._tokens[first + 1] - self._tokens[first])
        self._assignment.cut(rank, int(self._segments[last]), 0, tail)
        self._assignment.give(rank, self._segments[first + 1 : last])
