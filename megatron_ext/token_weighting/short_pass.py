"""Split rows into chunks and lay them out as micro-batches: for short contexts and sliding evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_ext.arrays import Bool, Int64
from megatron_ext.batch import ContextOptions, PackedBatch, Tokens, assemble
from megatron_ext.layout import concatenate
from megatron_ext.masks import AttentionMask, LayerMasks
from megatron_ext.short_context import Chunks, ShortContext, deal, short_chunks


@dataclass(frozen=True, eq=False)
class ShortPass:
    """The micro-batches that a rank computes without gradient before the loss of a step is weighted.

    Attributes:
        batches: micro-batches of equal length; their `places` index the tokens of all rows of the rank.
        scored: bool [tokens of all rows], the tokens whose losses the batches compute.
    """

    batches: list[PackedBatch]
    scored: Bool


@dataclass(frozen=True)
class Division:
    """The sizes of the micro-batches that chunks are packed into.

    Attributes:
        capacity: approximate tokens of a micro-batch.
        unit: a micro-batch's length is a multiple of this (the ranks that share it).
        multiple: the number of micro-batches is a multiple of this (for the interleaved pipeline).
    """

    capacity: int
    unit: int = 1
    multiple: int = 1


def short_pass(
    tokens: Sequence[Tokens],
    masks: Sequence[LayerMasks],
    short: ShortContext,
    division: Division,
    context: ContextOptions | None,
    rows_scored: Bool | None = None,
    bos_id: int | None = None,
) -> ShortPass:
    """Lay out the chunks of micro-batches as new micro-batches.

    If a row begins with `bos_id`, so does each of its chunks that cuts off tokens on which its first scored token
    depends: a model that was trained with BOS first in every row expects it. With BOS written B, n = 6 and s = 4:

        row         B  a  b  c  d  e  f  g  h  i
        chunk 1                 B  e  f  g  h  i        d is replaced

    Args:
        tokens, masks: of each micro-batch.
        short: the chunks.
        division: how chunks are packed into micro-batches.
        context: how micro-batches are split over context-parallel ranks.
        rows_scored: bool [rows of all micro-batches]; None for all.
        bos_id: the token that rows may begin with; None if they do not.
    """
    everything = _joined(masks)
    first_dependencies = everything.first_dependencies()
    chunks = short_chunks(everything.widest.row_length, first_dependencies, short)
    if rows_scored is not None:
        chunks = chunks.chosen(rows_scored[chunks.start // everything.widest.row_length])
    scored = np.zeros(everything.widest.tokens, dtype=np.bool_)
    scored[chunks.scored_tokens()] = True
    flat = _flat(tokens)
    unfolded = _Unfolded(flat, everything, context)
    if bos_id is not None:
        length = everything.widest.row_length
        begun = flat.tokens[chunks.start // length * length] == bos_id
        cut_off = first_dependencies[chunks.scored] < chunks.start
        unfolded = replace(unfolded, begin_with_bos=chunks.start[begun & cut_off], bos_id=bos_id)
    return ShortPass([unfolded.asked(*share) for share in _dealt(chunks, division)], scored)


def chunk_batches(
    tokens: Tokens, masks: LayerMasks, chunks: Chunks, division: Division, context: ContextOptions | None
) -> list[PackedBatch]:
    """Pack chunks into micro-batches of equal length, whose `places` index the tokens.

    Args:
        tokens, masks: of the rows.
        chunks: each sees only its own tokens.
        division: how chunks are packed into micro-batches.
        context: how micro-batches are split over context-parallel ranks.
    """
    unfolded = _Unfolded(tokens, masks, context)
    return [unfolded.asked(*share) for share in _dealt(chunks, division)]


def sliding_evaluation(
    tokens: Sequence[Tokens],
    masks: Sequence[LayerMasks],
    window: ShortContext,
    division: Division,
    context: ContextOptions | None,
) -> list[PackedBatch]:
    """Lay out the windows of a sliding evaluation as micro-batches in which each token counts once, where it is scored.

    Window k holds the row's tokens [k s, k s + n) and scores the last s, the first one all of its n: each token but
    the first n has n - s to n - 1 tokens before itself, or all of its segment. The arguments are those of `short_pass`.
    """
    everything = _joined(masks)
    # windows are cut at segment starts, not at the layers' left windows: losses are binned by position, which counts
    # from the start of the segment in the window
    segment_starts = AttentionMask(everything.widest).first_keys()
    chunks = short_chunks(everything.widest.row_length, segment_starts, window)
    unfolded = _Unfolded(_flat(tokens), everything, context)
    return [unfolded.trained(*share) for share in _dealt(chunks, division)]


def _flat(tokens: Sequence[Tokens]) -> Tokens:
    """Concatenate micro-batches."""
    return Tokens(*(np.concatenate([getattr(t, name) for t in tokens]) for name in ("tokens", "labels", "trained")))


def _dealt(chunks: Chunks, division: Division) -> list[tuple[Chunks, int]]:
    """Return for each micro-batch its chunks and its length, which is the same for all."""
    shares = [chunks.chosen(share) for share in deal(chunks.lengths, division.capacity, division.multiple)]
    # equal lengths, because the pipeline sends tensors of one shape and context-parallel ranks split each evenly
    longest = max((int(share.lengths.sum()) for share in shares), default=0)
    return [(share, -(-longest // division.unit) * division.unit) for share in shares]


def _joined(masks: Sequence[LayerMasks]) -> LayerMasks:
    """Concatenate the masks of micro-batches."""
    first = masks[0]
    scheduled = concatenate([mask.scheduled.layout for mask in masks])
    local = [mask.local.layout for mask in masks if mask.local is not None]
    return replace(
        first,
        scheduled=replace(first.scheduled, layout=scheduled),
        local=replace(first.local, layout=concatenate(local)) if first.local is not None else None,
    )


@dataclass(frozen=True, eq=False)
class _Unfolded:
    """Makes micro-batches of chunks, each padded to its length with one segment.

    Attributes:
        tokens, masks: of all rows.
        context: how a micro-batch is split over context-parallel ranks.
        begin_with_bos: int64, the starts of the chunks whose first token is replaced by `bos_id`; None for none.
    """

    tokens: Tokens
    masks: LayerMasks
    context: ContextOptions | None
    begin_with_bos: Int64 | None = None
    bos_id: int = 0

    def asked(self, chunks: Chunks, length: int) -> PackedBatch:
        """Return a micro-batch that trains nothing and returns the losses of the scored tokens."""
        wanted = np.zeros(length, dtype=np.bool_)
        wanted[chunks.places_of_scored()] = True
        batch = self._laid(chunks, length, trained=np.zeros(length, dtype=np.bool_), wanted=wanted)
        assert batch.places is not None
        # `assemble` indexes this micro-batch; the losses belong to the tokens of all rows
        order = torch.from_numpy(chunks.tokens())[batch.places.order]
        return replace(batch, places=replace(batch.places, order=order))

    def trained(self, chunks: Chunks, length: int) -> PackedBatch:
        """Return a micro-batch in which the scored tokens count, if they are trained in the rows."""
        trained = np.zeros(length, dtype=np.bool_)
        trained[chunks.places_of_scored()] = self.tokens.trained[chunks.scored_tokens()]
        return self._laid(chunks, length, trained=trained)

    def _laid(self, chunks: Chunks, length: int, *, trained: Bool, wanted: Bool | None = None) -> PackedBatch:
        source = chunks.tokens()
        padding = length - len(source)

        def padded(values: Int64) -> Int64:
            return np.append(values[source], np.zeros(padding, dtype=values.dtype))

        def cut(mask: AttentionMask) -> AttentionMask:
            return replace(mask, layout=chunks.layout(mask.layout, padding))

        tokens = padded(self.tokens.tokens)
        if self.begin_with_bos is not None:
            firsts = np.cumsum(chunks.lengths) - chunks.lengths
            tokens[firsts[np.isin(chunks.start, self.begin_with_bos)]] = self.bos_id
        local = self.masks.local
        inside = replace(self.masks, scheduled=cut(self.masks.scheduled), local=None if local is None else cut(local))
        laid = Tokens(tokens, padded(self.tokens.labels), trained, wanted=wanted)
        return assemble(laid, inside, self.context)
