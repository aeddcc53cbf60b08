"""The short context as a layout: a row is unfolded into overlapping chunks, each of which scores its last tokens.

Chunks of n tokens start `stride` s apart; chunk k holds the row's tokens [ks, ks + n) and scores the last s of them
(the first chunk scores all n). A row of 16 tokens, n = 6, s = 4:

    token      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    chunk 0   [S  S  S  S  S  S]
    chunk 1               [.  .  S  S  S  S]
    chunk 2                           [.  .  S  S  S  S]
    chunk 3                                       [.  .  S  S]

If the scorer is the trained model itself, a token whose output depends on no token before its chunk has the same
context in both passes: its score is 0 by layout, and it is not recomputed. Only the beginning of a chunk is then
needed, up to the last token that depends on tokens before the chunk: the part of one segment, or less if the layers'
left windows bound the dependence. Chunk 0 is never needed.
"""

from dataclasses import dataclass

import numpy as np

from megatron_ext.arrays import Bool, Int64, ranges
from megatron_ext.layout import PackedLayout, check_tokens


@dataclass(frozen=True)
class ShortContext:
    """Sizes of the chunks into which rows are unfolded."""

    length: int  # n >= 1, tokens of a chunk
    stride: int  # 1 <= s <= n, tokens that a chunk scores
    every_token: bool = False  # score all tokens (with a separate scorer), not only those whose contexts differ


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunk k holds the tokens [start, end) and scores [scored, end); int64 [K] each, in order of position."""

    start: Int64
    end: Int64
    scored: Int64

    @property
    def lengths(self) -> Int64:
        """int64 [K], tokens of each chunk."""
        return self.end - self.start

    def chosen(self, index: Int64 | Bool) -> "Chunks":
        return Chunks(self.start[index], self.end[index], self.scored[index])

    def tokens(self) -> Int64:
        """Return the tokens of all chunks, concatenated; int64, with repetitions."""
        return ranges(self.start, self.lengths)

    def scored_tokens(self) -> Int64:
        """Return the scored tokens, each once, ascending; int64."""
        return ranges(self.scored, self.end - self.scored)

    def places_of_scored(self) -> Int64:
        """Return the indices of the scored tokens in `tokens`; int64."""
        return ranges(np.cumsum(self.lengths) - (self.end - self.scored), self.end - self.scored)

    def layout(self, of: PackedLayout, padding: int = 0) -> PackedLayout:
        """Split the segments of `of` by chunk, concatenated in chunk order; a segment of `padding` tokens is appended.

        Raises:
            UserError: too many tokens for one layout.
        """
        total = int(self.lengths.sum()) + padding
        check_tokens(total)
        border = np.zeros(of.tokens + 1, dtype=np.bool_)
        border[of.cu_seqlens] = True
        inside = border[self.tokens()]
        inside[np.cumsum(self.lengths) - self.lengths] = True
        borders = np.concatenate([np.flatnonzero(inside), [len(inside)] if padding else [], [total]])
        return PackedLayout(total, borders.astype(np.int32))


def short_chunks(length: int, first_dependencies: Int64, context: ShortContext) -> Chunks:
    """Unfold concatenated rows of `length` tokens into the chunks that have tokens to score.

    `first_dependencies`: int64 [T], the first token on which each token's output depends (`LayerMasks`).
    """
    n = context.length
    s = context.stride
    offsets = np.arange(0, max(length - n + s, 1), s, dtype=np.int64)  # chunks that score a token of the row
    rows = np.arange(0, len(first_dependencies), length, dtype=np.int64)
    start = (rows[:, None] + offsets).reshape(-1)
    row_end = np.repeat(rows + length, len(offsets))
    chunks = Chunks(start, np.minimum(start + n, row_end), start + np.tile(np.where(offsets > 0, n - s, 0), len(rows)))
    if context.every_token:  # start at the dependence of the first scored token
        return Chunks(np.maximum(start, first_dependencies[chunks.scored]), chunks.end, chunks.scored)
    independent = np.searchsorted(first_dependencies, start)  # the first token that depends on nothing before the chunk
    cut = Chunks(start, np.minimum(chunks.end, independent), chunks.scored)
    return cut.chosen(cut.scored < cut.end)


def distribute(lengths: Int64, capacity: int, multiple: int = 1) -> list[Int64]:
    """Distribute chunks of `lengths` tokens, int64 [K], over as few micro-batches as possible, of similar lengths.

    A micro-batch has about `capacity` tokens, beyond it by less than the longest chunk; their number is a multiple of
    `multiple`. Returns the chunk indices of each one, ascending; some may be empty.
    """
    total = int(lengths.sum())
    if not total:
        return []
    batches = -(-total // capacity)
    batches = -(-batches // multiple) * multiple
    filled = np.zeros(batches, dtype=np.int64)
    owner = np.empty(len(lengths), dtype=np.int64)
    for chunk in np.argsort(-lengths, kind="stable"):  # the longest first, to the emptiest micro-batch
        owner[chunk] = filled.argmin()
        filled[owner[chunk]] += lengths[chunk]
    return [np.flatnonzero(owner == batch) for batch in range(batches)]
