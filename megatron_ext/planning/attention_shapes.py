"""Compute the sizes of a rank's attention calls for rows of a single document each: the largest that a step can need.

Masks, plan, scheme and backend come from the code that training uses; only sizes of a plan are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch

from megatron_ext.arrays import Bool
from megatron_ext.attention.backends import by_keys, suited
from megatron_ext.attention.exchange import ContextGroup
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions, context_options
from megatron_ext.config import Config
from megatron_ext.context_parallel import CPPlan
from megatron_ext.masks import AttentionMask, MaskOptions


@dataclass(frozen=True)
class Call:
    """The sizes of one call of a kernel: rows of queries and of keys, segments, and the backend that serves it."""

    queries: int
    keys: int
    segments: int
    backend: str


@dataclass(frozen=True)
class Shapes:
    """The sizes of one layer's attention on one context-parallel rank.

    Attributes:
        tokens: number of tokens of this rank.
        scheme: how keys come from other ranks; None if none do.
        local: the queries that see only this rank's keys; all queries without `scheme` and under Ulysses.
        remote: the other queries.
    """

    tokens: int
    scheme: Scheme | None
    local: Call | None
    remote: Call | None = None

    @property
    def calls(self) -> Iterator[Call]:
        """Yield the calls that exist."""
        yield from (call for call in (self.local, self.remote) if call is not None)


def attention_shapes(config: Config, window: int) -> tuple[tuple[Shapes, ...], ...]:
    """Return for each context-parallel rank the shapes of layers under the window, and of local layers if any."""
    parallel, model, data = config.parallel, config.model, config.data
    device = torch.device("cpu" if parallel.device == "cpu" else "cuda")
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    backends = suited(parallel.attention_backend, device, dtype, model.head_size, sinks=model.has_sinks)
    context = context_options(config, planned_group(parallel.context_parallel_size))
    return _shapes(config.mask_options(), data.seq_length, data.micro_batch_size, window, backends, context)


@cache
def planned_group(size: int) -> ContextGroup:
    """Return a group without processes, the same object for each size."""
    return ContextGroup(0, size, None)


@lru_cache(maxsize=1024)
def _shapes(
    options: MaskOptions,
    row_length: int,
    rows: int,
    window: int,
    backends: tuple[str, ...],
    context: ContextOptions | None,
) -> tuple[tuple[Shapes, ...], ...]:
    masks = options.at(row_length, [np.array([row_length])] * rows, window)
    if context is None:
        return (tuple(_whole(mask, 1, backends, None) for _, mask in masks.by_layers()),)
    plans, ranks = [(plan, context.choose(plan)) for plan in context.plans(masks)], context.group.size
    return tuple(
        tuple(
            _whole(plan, ranks, backends, chosen) if chosen is Scheme.ULYSSES else _of_rank(plan, rank, backends)
            for plan, chosen in plans
        )
        for rank in range(ranks)
    )


def _whole(mask: AttentionMask | CPPlan, ranks: int, backends: tuple[str, ...], scheme: Scheme | None) -> Shapes:
    """Return the shapes of a call that sees all tokens."""
    layout = mask.layout
    backend = by_keys(int(layout.lengths.max()), mask.left_window, backends)
    call = Call(layout.tokens, layout.tokens, len(layout.lengths), backend)
    return Shapes(layout.tokens // ranks, scheme, call)


def _of_rank(plan: CPPlan, rank: int, backends: tuple[str, ...]) -> Shapes:
    """Return the shapes of one rank under the exchange of keys."""
    own = plan.pieces_of(rank)
    queries, keys = plan.pieces.end[own] - plan.pieces.start[own], plan.pieces.end[own] - plan.key_start[own]
    local = queries == keys  # as in `RankPlan.is_local`
    tokens = int(queries.sum())

    def call(pieces: Bool) -> Call | None:
        if not pieces.any():
            return None
        backend = by_keys(int(keys[pieces].max()), plan.left_window, backends)
        return Call(int(queries[pieces].sum()), int(keys[pieces].sum()), int(pieces.sum()), backend)

    if not plan.rows_moved.any():  # every rank holds whole segments
        return Shapes(tokens, None, call(np.ones_like(local)))
    return Shapes(tokens, Scheme.EXCHANGE, call(local), call(~local))
