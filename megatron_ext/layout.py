"""From document ends and the window to segments: the layout that every room opens onto.

A token attends to the tokens of its own segment at and before it, and to nothing else. Segments are what
is left of a row between the union of the window's grid and the document ends. For a row of 12 tokens,
window 4, documents ending after tokens 2 and 9 (exclusive ends 3 and 10):

    token      0  1  2  3  4  5  6  7  8  9 10 11
    document   a  a  a  b  b  b  b  b  b  b  c  c
    grid       0  0  0  0  1  1  1  1  2  2  2  2
    segment    0  0  0  1  2  2  2  2  3  3  4  4        cu_seqlens = [0, 3, 4, 8, 10, 12]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron_ext.arrays import Int32, Int64
from megatron_ext.errors import UserError

Count = TypeVar("Count", int, Int64)

MOST_TOKENS = 2**31 - 1  # of one packed layout: attention kernels take its borders as int32


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Holds the segments of one row, or of several rows laid end to end.

    Attributes:
        row_length: L, tokens of each row; every multiple of it is a segment border.
        cu_seqlens: int32 [S+1], the borders of the S segments, from 0 to the number of tokens T.
    """

    row_length: int
    cu_seqlens: Int32

    @property
    def tokens(self) -> int:
        """T, the tokens of all rows."""
        return int(self.cu_seqlens[-1])

    @property
    def segments(self) -> int:
        """S, the number of segments."""
        return len(self.cu_seqlens) - 1

    @cached_property
    def lengths(self) -> Int64:
        """int64 [S], the tokens of each segment."""
        return np.diff(self.cu_seqlens).astype(np.int64)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment."""
        return int(self.lengths.max())

    def attention_pairs(self, left_window: int | None = None) -> int:
        """Count the pairs of a query and a visible key; with `left_window`, at most that many tokens before itself."""
        return int(segment_pairs(self.lengths, left_window).sum())

    def positions(self) -> Int32:
        """Number the tokens of each segment from 0; int32 [T]."""
        starts = np.repeat(self.cu_seqlens[:-1], self.lengths)
        return np.arange(self.tokens, dtype=np.int32) - starts


def segment_pairs(tokens: Count, left_window: int | None = None) -> Count:
    """Count the pairs of a query and a key that it sees among the first tokens of a segment.

    Everything that counts attention's work counts it here. With a left window of 2 the first 5 tokens have 12 pairs:

        token    0  1  2  3  4
        keys     1  2  3  3  3      15 of the triangle, less the triangle of 2 tokens beyond the left_window: 1 + 2

    Args:
        tokens: how many, an integer or int64 array of any shape.
        left_window: tokens before itself that a token sees at most; None for all of them.
    """
    pairs = tokens * (tokens + 1) // 2
    if left_window is None:
        return pairs
    beyond = tokens - (left_window + 1)
    beyond = (beyond + abs(beyond)) // 2  # max(beyond, 0), of an integer as of an array
    return pairs - beyond * (beyond + 1) // 2


def build_layout(row_length: int, document_ends: Sequence[int] | npt.NDArray[np.integer], window: int) -> PackedLayout:
    """Cut one row into segments (arXiv 2503.15450: block-diagonal causal mask on a grid, united with IntraDoc).

    Args:
        row_length: L >= 1.
        document_ends: exclusive ends in 0..L, in any order: a document ends *after* its EOD, so the token
            at `end` is the first of the next one. Empty where documents do not bound attention.
        window: w >= 1; the grid is {w, 2w, ...}. A window of L or more adds no border.

    Raises:
        UserError: a length or window below 1, a document end outside 0..L, or a row longer than MOST_TOKENS.
    """
    if row_length < 1:
        raise UserError(f"row_length: got {row_length}, needs >= 1 token")
    if window < 1:
        raise UserError(f"window: got {window}, needs >= 1 token")
    check_tokens(row_length)
    ends = np.asarray(document_ends, dtype=np.int64)
    if ends.size and not (ends.min() >= 0 and ends.max() <= row_length):
        raise UserError(
            f"document_ends: got values from {ends.min()} to {ends.max()}, needs 0..{row_length} (the row's length)"
        )
    # marks instead of a sort of all borders: linear in the row's length, and borders that coincide count once
    border = np.zeros(row_length + 1, dtype=bool)
    border[::window] = True
    border[ends] = True
    border[row_length] = True
    return PackedLayout(row_length, np.flatnonzero(border).astype(np.int32))


def concatenate(layouts: Sequence[PackedLayout]) -> PackedLayout:
    """Concatenate rows: a micro-batch of m rows is one packed layout whose grid restarts at each row.

    Raises:
        ValueError: no layout, or rows of different lengths.
        UserError: more than MOST_TOKENS in all rows.
    """
    lengths = {layout.row_length for layout in layouts}
    if len(lengths) != 1:
        raise ValueError(f"layouts: got row lengths {sorted(lengths)}, needs one common length")
    offsets = np.cumsum([0] + [layout.tokens for layout in layouts[:-1]])
    borders = [layout.cu_seqlens[:-1] + offset for layout, offset in zip(layouts, offsets, strict=True)]
    total = offsets[-1] + layouts[-1].tokens
    check_tokens(int(total))
    return PackedLayout(lengths.pop(), np.append(np.concatenate(borders), total).astype(np.int32))


def check_tokens(tokens: int) -> None:
    """Refuse more tokens in one packed layout than its int32 borders can count.

    Raises:
        UserError: more than MOST_TOKENS.
    """
    if tokens > MOST_TOKENS:
        raise UserError(
            f"micro_batch_size: got {tokens:,} tokens in one micro-batch, needs at most 2^31 - 1 = {MOST_TOKENS:,}, "
            "which attention counts in int32; lower micro_batch_size or seq_length"
        )
