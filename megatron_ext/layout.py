"""Compute attention segments from document ends and the window.

A token attends to the tokens of its own segment up to and including itself. Segments are the intervals of a row
between borders; borders are the union of the window's grid and the document ends. For a row of 12 tokens, window 4,
documents ending after tokens 2 and 9 (exclusive ends 3 and 10):

    token      0  1  2  3  4  5  6  7  8  9 10 11
    document   a  a  a  b  b  b  b  b  b  b  c  c
    grid       0  0  0  0  1  1  1  1  2  2  2  2
    segment    0  0  0  1  2  2  2  2  3  3  4  4        cu_seqlens = [0, 3, 4, 8, 10, 12]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron_ext.arrays import Int32, Int64
from megatron_ext.errors import UserError

Count = TypeVar("Count", int, Int64)

MOST_TOKENS = 2**31 - 1  # in one packed layout: attention kernels take cu_seqlens as int32


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """The segments of one row, or of several concatenated rows."""

    row_length: int  # L, tokens per row; every multiple of it is a segment border
    cu_seqlens: Int32  # int32 [S+1], the borders of the S segments, from 0 to the number of tokens T

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

    def attention_pairs(self, left_window: int | None = None) -> int:
        """Count the (query, visible key) pairs; `left_window` limits the tokens before itself that a query sees."""
        return int(segment_pairs(self.lengths, left_window).sum())

    def positions(self) -> Int32:
        """Return each token's position in its segment, from 0; int32 [T]."""
        starts = np.repeat(self.cu_seqlens[:-1], self.lengths)
        return np.arange(self.tokens, dtype=np.int32) - starts


def segment_pairs(tokens: Count, left_window: int | None = None) -> Count:
    """Count the (query, visible key) pairs of the first tokens of a segment.

    All counts of attention work use this function, for an integer or an int64 array of any shape. With a left window of
    2 the first 5 tokens have 12 pairs:

        token    0  1  2  3  4
        keys     1  2  3  3  3      15 of the triangle, minus the 1 + 2 pairs beyond the left window
    """
    pairs = tokens * (tokens + 1) // 2
    if left_window is None:
        return pairs
    beyond = tokens - (left_window + 1)
    beyond = (beyond + abs(beyond)) // 2  # max(beyond, 0), for integers and arrays
    return pairs - beyond * (beyond + 1) // 2


def build_layout(row_length: int, document_ends: Sequence[int] | npt.NDArray[np.integer], window: int) -> PackedLayout:
    """Split one row into segments (arXiv 2503.15450: block-diagonal causal mask on a grid, united with IntraDoc).

    Args:
        document_ends: exclusive ends in 0..L, in any order: a document ends *after* its EOD, so the token
            at `end` is the first of the next one. Empty if documents do not bound attention.
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
    # A boolean mask instead of sorting the borders: linear time, and coinciding borders count once.
    border = np.zeros(row_length + 1, dtype=bool)
    border[::window] = True
    border[ends] = True
    border[row_length] = True
    return PackedLayout(row_length, np.flatnonzero(border).astype(np.int32))


def concatenate(layouts: Sequence[PackedLayout]) -> PackedLayout:
    """Concatenate rows: a micro-batch of m rows is one packed layout whose grid restarts at each row.

    Raises:
        UserError: more than MOST_TOKENS in all rows.
    """
    (row_length,) = {layout.row_length for layout in layouts}
    offsets = np.cumsum([0] + [layout.tokens for layout in layouts[:-1]])
    borders = [layout.cu_seqlens[:-1] + offset for layout, offset in zip(layouts, offsets, strict=True)]
    total = offsets[-1] + layouts[-1].tokens
    check_tokens(int(total))
    return PackedLayout(row_length, np.append(np.concatenate(borders), total).astype(np.int32))


def check_tokens(tokens: int) -> None:
    """Check that the tokens of one packed layout fit its int32 borders.

    Raises:
        UserError: more than MOST_TOKENS.
    """
    if tokens > MOST_TOKENS:
        raise UserError(
            f"micro_batch_size: got {tokens:,} tokens in one micro-batch, needs at most 2^31 - 1 = {MOST_TOKENS:,}, "
            "which attention counts in int32; lower micro_batch_size or seq_length"
        )
