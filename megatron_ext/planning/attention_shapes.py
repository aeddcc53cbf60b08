"""Compute the sizes of a rank's attention calls for rows of a single document each: the largest that a step can need.

Masks, plan, scheme and backend come from the code that training uses; only sizes of a plan are kept.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from megatron_ext.arrays import Int64
from megatron_ext.attention.backends import by_keys, suited
from megatron_ext.attention.exchange import ContextGroup
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions, context_options
from megatron_ext.config import Config
from megatron_ext.context_parallel import CPPlan
from megatron_ext.masks import AttentionMask, MaskOptions


class Call(NamedTuple):
    """The sizes of one call of a kernel, and the backend that serves it."""

    queries: int
    keys: int
    segments: int
    backend: str


class Shapes(NamedTuple):
    """The sizes of one layer's attention on one context-parallel rank."""

    tokens: int  # of this rank
    scheme: Scheme | None  # how keys come from other ranks; None if none do
    local: Call | None  # the queries that see only this rank's keys; all queries without `scheme` and under Ulysses
    remote: Call | None = None  # the other queries

    @property
    def calls(self) -> list[Call]:
        """The calls that exist."""
        return [call for call in (self.local, self.remote) if call is not None]


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
        tokens = row_length * rows
        return (tuple(Shapes(tokens, None, _whole(mask, backends)) for _, mask in masks.by_layers()),)
    plans = [(plan, context.choose(plan)) for plan in context.plans(masks)]
    return tuple(
        tuple(_of_rank(plan, scheme, rank, backends) for plan, scheme in plans) for rank in range(context.group.size)
    )


def _of_rank(plan: CPPlan, scheme: Scheme, rank: int, backends: tuple[str, ...]) -> Shapes:
    tokens = plan.layout.tokens // plan.cp_size
    if scheme is Scheme.ULYSSES:
        return Shapes(tokens, scheme, _whole(plan, backends))
    own = plan.pieces_of(rank)
    queries, keys = plan.pieces.end[own] - plan.pieces.start[own], plan.pieces.end[own] - plan.key_start[own]
    if not plan.rows_moved.any():  # every rank holds whole segments
        return Shapes(tokens, None, _call(queries, keys, plan.left_window, backends))
    local, remote = (  # as in `RankPlan.is_local`
        _call(queries[chosen], keys[chosen], plan.left_window, backends) for chosen in (queries == keys, queries < keys)
    )
    return Shapes(tokens, scheme, local, remote)


def _whole(mask: AttentionMask | CPPlan, backends: tuple[str, ...]) -> Call | None:
    return _call(mask.layout.lengths, mask.layout.lengths, mask.left_window, backends)


def _call(queries: Int64, keys: Int64, left_window: int | None, backends: tuple[str, ...]) -> Call | None:
    """Return the call of pieces with these numbers of queries and keys; None if there are none."""
    if not len(keys):
        return None
    return Call(int(queries.sum()), int(keys.sum()), len(keys), by_keys(int(keys.max()), left_window, backends))
