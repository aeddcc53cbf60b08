"""Says how large the attention calls of a rank are, in rows that are one document each: what takes most.

Masks, plan, scheme and kernel come from the code that a run asks; of a plan only the sizes are kept.

    t queries of a rank = those at home (they see its own keys alone) + those away (they see keys of others too)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from megatron_ext.arrays import Bool
from megatron_ext.attention.choice import by_keys, suited
from megatron_ext.attention.exchange import ContextGroup, Traffic
from megatron_ext.attention.interface import Scheme
from megatron_ext.batch import ContextOptions
from megatron_ext.config import Config
from megatron_ext.context_parallel import CPPlan
from megatron_ext.layout import PackedLayout
from megatron_ext.masks import MaskOptions


@dataclass(frozen=True)
class Call:
    """Holds the sizes of one call of a kernel.

    Attributes:
        queries, keys: rows.
        segments: of the call.
        backend: that serves it.
    """

    queries: int
    keys: int
    segments: int
    backend: str


@dataclass(frozen=True)
class Shapes:
    """Holds the sizes of one layer's attention on one context-parallel rank.

    Attributes:
        tokens: of this rank.
        scheme: how keys come from other ranks; None where none do.
        home: of the queries that see this rank's keys alone; without `scheme` and under Ulysses of all.
        away: of the others.
        copied_home, copied_away: whether queries of either kind lie in several runs of rows, which are copied into one.
    """

    tokens: int
    scheme: Scheme | None
    home: Call | None
    away: Call | None = None
    copied_home: bool = False
    copied_away: bool = False

    @property
    def calls(self) -> Iterator[Call]:
        """Yield what there is of both."""
        yield from (call for call in (self.home, self.away) if call is not None)


@dataclass(frozen=True)
class _Question:
    """Holds all that the shapes depend on."""

    row_length: int
    rows: int
    window: int
    masks: MaskOptions
    backends: tuple[str, ...]
    ranks: int
    policy: str
    scheme: str
    row_cost: float
    heads: int
    key_heads: int


def attention_shapes(config: Config, window: int) -> tuple[tuple[Shapes, ...], ...]:
    """Return the shapes on each context-parallel rank: of layers that follow the window, and of local ones if any."""
    parallel, model = config.parallel, config.model
    device = torch.device("cpu" if parallel.device == "cpu" else "cuda")
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    return _answer(
        _Question(
            row_length=config.data.seq_length,
            rows=config.data.micro_batch_size,
            window=window,
            masks=config.mask_options(),
            backends=suited(parallel.attention_backend, device, dtype, model.head_size),
            ranks=parallel.context_parallel_size,
            policy=parallel.cp_policy,
            scheme=parallel.cp_scheme,
            row_cost=parallel.cp_row_cost,
            heads=model.num_attention_heads // parallel.tensor_model_parallel_size,
            key_heads=model.num_query_groups // parallel.tensor_model_parallel_size,
        )
    )


@lru_cache(maxsize=1024)
def _answer(asked: _Question) -> tuple[tuple[Shapes, ...], ...]:
    ends = [np.array([asked.row_length])] * asked.rows
    masks = asked.masks.at(asked.row_length, ends, asked.window)
    of_layers = [mask for _, mask in masks.by_layers()]
    if asked.ranks == 1:
        return (tuple(_whole(mask.layout, mask.left_window, asked, None) for mask in of_layers),)
    options = ContextOptions(
        group=ContextGroup(0, asked.ranks, None, Traffic()),
        policy=asked.policy,
        scheme=None if asked.scheme == "auto" else Scheme(asked.scheme),
        heads=asked.heads,
        key_heads=asked.key_heads,
        row_cost=asked.row_cost,
    )
    plans = [(plan, options.choose(plan)) for plan in options.plans(masks)]
    return tuple(
        tuple(
            _whole(plan.layout, plan.left_window, asked, scheme)
            if scheme is Scheme.ULYSSES
            else _of_rank(plan, rank, asked.backends)
            for plan, scheme in plans
        )
        for rank in range(asked.ranks)
    )


def _whole(layout: PackedLayout, left_window: int | None, asked: _Question, scheme: Scheme | None) -> Shapes:
    """Return the shapes of a call that sees all tokens."""
    backend = by_keys(int(layout.lengths.max()), left_window, asked.backends)
    call = Call(layout.tokens, layout.tokens, len(layout.lengths), backend)
    return Shapes(layout.tokens // asked.ranks, scheme, call)


def _of_rank(plan: CPPlan, rank: int, backends: tuple[str, ...]) -> Shapes:
    """Return the shapes of one rank under the exchange of keys, without the lists of rows that the exchange needs."""
    own = plan.pieces_of(rank)
    queries, keys = plan.piece_end[own] - plan.piece_start[own], plan.piece_end[own] - plan.key_start[own]
    home = queries == keys  # as `attention.exchange.local_pieces` says
    tokens = int(queries.sum())

    def call(pieces: Bool) -> Call | None:
        if not pieces.any():
            return None
        backend = by_keys(int(keys[pieces].max()), plan.left_window, backends)
        return Call(int(queries[pieces].sum()), int(keys[pieces].sum()), int(pieces.sum()), backend)

    if not plan.rows_moved.any():  # every rank holds whole segments
        return Shapes(tokens, None, call(np.ones_like(home)))
    runs = np.diff(home, prepend=~home[:1])  # where a run of pieces of one kind starts
    several_home, several_away = (int((runs & kind).sum()) > 1 for kind in (home, ~home))
    return Shapes(tokens, Scheme.EXCHANGE, call(home), call(~home), several_home, several_away)
