"""Split rows into chunks and lay them out as micro-batches: for short contexts and sliding evaluations."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_ext.arrays import Bool, Int64
from megatron_ext.batch import PackedBatch, Tokens, assemble
from megatron_ext.config import Config
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.masks import AttentionMask, LayerMasks
from megatron_ext.short_context import Chunks, ShortContext, distribute, short_chunks


@dataclass(frozen=True, eq=False)
class ShortPass:
    """The micro-batches that a rank computes without gradient before the loss of a step is weighted."""

    batches: list[PackedBatch]  # micro-batches of equal length; their `places` index the tokens of all rows of the rank
    scored: Bool  # bool [tokens of all rows], the tokens whose losses the batches compute


@dataclass(frozen=True)
class Division:
    """The sizes of the micro-batches that chunks are packed into."""

    capacity: int  # approximate tokens of a micro-batch
    unit: int = 1  # a micro-batch's length is a multiple of this (the ranks that share it)
    multiple: int = 1  # the number of micro-batches is a multiple of this (for the interleaved pipeline)

    @classmethod
    def of(cls, config: Config, tokens: int) -> "Division":
        """Return the division into micro-batches of about `tokens` tokens under a run's parallel layout."""
        parallel = config.parallel
        unit_of_rank = math.lcm(parallel.tensor_model_parallel_size, config.training.fp8_multiple)
        if parallel.sequence_parallel:
            unit_of_rank = parallel.tensor_model_parallel_size * config.training.fp8_gathered_multiple
        multiple = 1
        if parallel.is_interleaved:
            multiple = parallel.pipeline_model_parallel_size
        return cls(tokens, unit_of_rank * parallel.context_parallel_size, multiple)


def short_pass(
    tokens: Tokens,
    masks: LayerMasks,
    short: ShortContext,
    division: Division,
    context: CPOptions | None,
    bos_id: int | None = None,
) -> ShortPass:
    """Lay out the chunks of rows, given by their tokens and masks, as micro-batches.

    A model that was trained with BOS first in every row expects BOS first in every chunk. So `bos_id` replaces the
    first token of a chunk if its row begins with `bos_id` and its first scored token depends on tokens before the
    chunk. With BOS written B, n = 6 and s = 4:

        row         B  a  b  c  d  e  f  g  h  i
        chunk 1                 B  e  f  g  h  i        d is replaced
    """
    length = masks.widest.row_length
    first_dependencies = masks.first_dependencies()
    chunks = short_chunks(length, first_dependencies, short)
    scored = np.zeros(masks.widest.tokens, dtype=np.bool_)
    scored[chunks.scored_tokens()] = True
    bos_starts = None
    if bos_id is not None:
        row_has_bos = tokens.tokens[chunks.start // length * length] == bos_id
        is_cut_off = first_dependencies[chunks.scored] < chunks.start
        bos_starts = chunks.start[row_has_bos & is_cut_off]
    batches = chunk_batches(tokens, masks, chunks, division, context, bos_starts, bos_id or 0)
    return ShortPass(batches, scored)


def chunk_batches(
    tokens: Tokens,
    masks: LayerMasks,
    chunks: Chunks,
    division: Division,
    context: CPOptions | None,
    bos_starts: Int64 | None = None,
    bos_id: int = 0,
) -> list[PackedBatch]:
    """Pack chunks into micro-batches of equal length that train nothing and return the losses of the scored tokens.

    The batches' `places` index `tokens`, the tokens of whole rows. The first token of the chunks that start at
    `bos_starts` is replaced by `bos_id`.
    """
    batches = []
    for share, chunk_tokens, chunk_masks in _micro_batches(tokens, masks, chunks, division):
        is_scored = np.zeros_like(chunk_tokens.trained)
        is_scored[share.places_of_scored()] = True
        if bos_starts is not None:
            firsts = np.cumsum(share.lengths) - share.lengths
            chunk_tokens.tokens[firsts[np.isin(share.start, bos_starts)]] = bos_id
        batch = assemble(replace(chunk_tokens, wanted=is_scored), chunk_masks, context)
        assert batch.places is not None
        # `assemble` indexes this micro-batch; the losses belong to the tokens of all rows
        order = torch.from_numpy(share.tokens())[batch.places.order]
        batches.append(replace(batch, places=replace(batch.places, order=order)))
    return batches


def sliding_evaluation(
    tokens: Tokens, masks: LayerMasks, window: ShortContext, division: Division, context: CPOptions | None
) -> list[PackedBatch]:
    """Lay out the windows of a sliding evaluation as micro-batches in which each token counts once.

    Window k holds the row's tokens [k s, k s + n) and scores the last s, the first one all of its n: each token but the
    first n has n - s to n - 1 tokens before itself, or all of its segment.
    """
    # windows are cut at segment starts, not at the layers' left windows: losses are binned by position, which counts
    # from the start of the segment in the window
    segment_starts = AttentionMask(masks.widest).first_keys()
    chunks = short_chunks(masks.widest.row_length, segment_starts, window)
    batches = []
    for share, chunk_tokens, chunk_masks in _micro_batches(tokens, masks, chunks, division):
        chunk_tokens.trained[share.places_of_scored()] = tokens.trained[share.scored_tokens()]
        batches.append(assemble(chunk_tokens, chunk_masks, context))
    return batches


def _micro_batches(
    tokens: Tokens, masks: LayerMasks, chunks: Chunks, division: Division
) -> Iterator[tuple[Chunks, Tokens, LayerMasks]]:
    """Yield the chunks of each micro-batch, their tokens, not trained, and the masks inside the chunks.

    Micro-batches are padded with zeros, a segment of its own, to one length: the pipeline sends tensors of one shape,
    and context-parallel ranks split each evenly.
    """
    shares = [chunks.chosen(share) for share in distribute(chunks.lengths, division.capacity, division.multiple)]
    longest = max((int(share.lengths.sum()) for share in shares), default=0)
    length = -(-longest // division.unit) * division.unit
    for share in shares:
        source = share.tokens()
        padding = np.zeros(length - len(source), dtype=tokens.tokens.dtype)
        chunk_tokens = Tokens(
            np.append(tokens.tokens[source], padding),
            np.append(tokens.labels[source], padding),
            np.zeros(length, dtype=np.bool_),
        )
        by_kind = tuple(replace(mask, layout=share.layout(mask.layout, len(padding))) for mask in masks.by_kind)
        yield share, chunk_tokens, replace(masks, by_kind=by_kind)
