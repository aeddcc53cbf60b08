"""The short-context pass over the rows of one step: chunks, dealt out to micro-batches like any other tokens."""

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
    """Holds the micro-batches that a rank computes without gradient before a step's loss is weighted.

    Attributes:
        batches: micro-batches of equal length; their `places` count through the tokens of all rows of the rank.
        scored: bool [tokens of all rows], whose losses the batches give.
    """

    batches: list[PackedBatch]
    scored: Bool


@dataclass(frozen=True)
class Division:
    """Says of what sizes the micro-batches are that chunks become.

    Attributes:
        capacity: tokens of a micro-batch, about.
        unit: a micro-batch's length is a multiple of this (the ranks that share it).
        multiple: the number of micro-batches is a multiple of this (the interleaved pipeline's).
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
) -> ShortPass:
    """Lay the chunks of micro-batches out as micro-batches of their own.

    Args:
        tokens, masks: of each micro-batch.
        short: the chunks.
        division: how they become micro-batches again.
        context: how those are shared out over context-parallel ranks.
        rows_scored: bool [rows of all micro-batches]; None for all.
    """
    everything = _joined(masks)
    chunks = short_chunks(everything.widest.row_length, everything.first_dependencies(), short)
    if rows_scored is not None:
        chunks = chunks.chosen(rows_scored[chunks.start // everything.widest.row_length])
    scored = np.zeros(everything.widest.tokens, dtype=np.bool_)
    scored[chunks.scored_tokens()] = True
    flat = Tokens(*(np.concatenate([getattr(t, name) for t in tokens]) for name in ("tokens", "labels", "trained")))
    return ShortPass(chunk_batches(flat, everything, chunks, division, context), scored)


def chunk_batches(
    tokens: Tokens, masks: LayerMasks, chunks: Chunks, division: Division, context: ContextOptions | None
) -> list[PackedBatch]:
    """Deal chunks out to micro-batches of equal length, whose `places` count through the tokens.

    Args:
        tokens, masks: what the chunks are of.
        chunks: each sees its own tokens alone.
        division: how they become micro-batches.
        context: how those are shared out over context-parallel ranks.
    """
    shares = [chunks.chosen(share) for share in deal(chunks.lengths, division.capacity, division.multiple)]
    # equal lengths, as the pipeline sends tensors of one shape and context-parallel ranks share each evenly
    longest = max((int(share.lengths.sum()) for share in shares), default=0)
    length = -(-longest // division.unit) * division.unit
    return [_batch(tokens, masks, share, length, context) for share in shares]


def _joined(masks: Sequence[LayerMasks]) -> LayerMasks:
    """Lay the masks of micro-batches end to end."""
    first = masks[0]
    scheduled = concatenate([mask.scheduled.layout for mask in masks])
    local = [mask.local.layout for mask in masks if mask.local is not None]
    return replace(
        first,
        scheduled=replace(first.scheduled, layout=scheduled),
        local=replace(first.local, layout=concatenate(local)) if first.local is not None else None,
    )


def _batch(
    tokens: Tokens, masks: LayerMasks, chunks: Chunks, length: int, context: ContextOptions | None
) -> PackedBatch:
    """Make one micro-batch of chunks, filled up to its length with a segment of padding."""
    source = chunks.tokens()
    padding = length - len(source)
    wanted = np.zeros(length, dtype=np.bool_)
    wanted[chunks.places_of_scored()] = True

    def padded(values: Int64) -> Int64:
        return np.append(values[source], np.zeros(padding, dtype=values.dtype))

    def cut(mask: AttentionMask) -> AttentionMask:
        return replace(mask, layout=chunks.layout(mask.layout, padding))

    inside = replace(masks, scheduled=cut(masks.scheduled), local=cut(masks.local) if masks.local is not None else None)
    of_chunks = Tokens(padded(tokens.tokens), padded(tokens.labels), np.zeros(length, dtype=np.bool_), wanted=wanted)
    batch = assemble(of_chunks, inside, context)
    assert batch.places is not None
    # `assemble` counts through this micro-batch; the losses belong among the tokens of all rows
    order = torch.from_numpy(source)[batch.places.order]
    return replace(batch, places=replace(batch.places, order=order))
