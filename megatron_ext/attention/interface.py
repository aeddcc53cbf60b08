"""Describe a call of packed attention: which queries see which keys, and how keys of other ranks are fetched.

docs/glossary.md lists the letters of shapes, for this module and the other modules of attention.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_ext.arrays import Bool, Int32
from megatron_ext.context_parallel import CPPlan
from megatron_ext.context_parallel.exchange import QKV, HeadExchange, KeyExchange, LocalAttention, RowPicks, Scheme
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.layout import PackedLayout

T = TypeVar("T")

# Computes what a kernel takes, keys [u, G, H] and values [u, G, W], from two tensors with a row for each token
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# Stores the new keys and values of a layer, by its number, and returns all that the call sees: the cached ones first
Extend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
# (inputs, which queries see which keys, the factor of the dot products before the softmax) -> output [t, N, W]
Attend = Callable[[QKV, "AttentionCall", float], Tensor]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A call of packed attention: the queries of segment i see its keys, causally from the bottom right.

    With q queries and k >= q keys in a segment, query j sees the keys up to j + (k - q):

        q = 2, k = 4      keys  0 1 2 3
                   query 0      x x x .
                   query 1      x x x x

    With a sliding window, it sees only that key and the `left_window` keys before it.
    """

    cu_seqlens_q: Int32  # int32 [S+1] on the host, the borders of the segments in the queries
    cu_seqlens_kv: Int32  # int32 [S+1] on the host, the borders of the segments in the keys and values
    borders: tuple[Tensor, Tensor]  # both as tensors, which `moved` copies to the device
    left_window: int | None = None  # the most tokens before itself that a query sees; None for its whole segment
    # how keys of other context-parallel ranks are fetched; None if no rank needs any
    exchange: KeyExchange | HeadExchange | None = None
    cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)  # of `once`
    # The same call restricted to the pieces that need no other rank's keys (local), and to the pieces that do (remote).
    # None if all pieces are of one kind, or if no keys are exchanged.
    local: "AttentionCall | None" = None
    remote: "AttentionCall | None" = None

    @classmethod
    def of(
        cls,
        cu_seqlens_q: Int32,
        cu_seqlens_kv: Int32,
        left_window: int | None = None,
        exchange: KeyExchange | HeadExchange | None = None,
    ) -> "AttentionCall":
        # two tensors even of one array: for a shared one torch 2.15's varlen_attn may call cuDNN, with other limits
        borders = torch.from_numpy(cu_seqlens_q), torch.from_numpy(cu_seqlens_kv)
        return cls(cu_seqlens_q, cu_seqlens_kv, borders, left_window, exchange)

    @classmethod
    def of_layout(cls, layout: PackedLayout, left_window: int | None = None) -> "AttentionCall":
        """Return the call of a process that holds every token."""
        return cls.of(layout.cu_seqlens, layout.cu_seqlens, left_window)

    @classmethod
    def of_plan(cls, plan: CPPlan, context: CPGroup, scheme: Scheme) -> "AttentionCall":
        """Return the call of one context-parallel rank."""
        if scheme is Scheme.ULYSSES:
            borders = plan.layout.cu_seqlens
            exchange = HeadExchange(RowPicks.of(np.concatenate(plan.rows)), context)
            return cls.of(borders, borders, plan.left_window, exchange)
        rank_plan = plan.of_rank(context.rank)
        keys = None
        if plan.rows_moved.any():
            keys = KeyExchange.of_rank(rank_plan, context)
        whole = cls.of(rank_plan.cu_seqlens_q, rank_plan.cu_seqlens_kv, plan.left_window, keys)
        is_local = rank_plan.is_local
        if is_local.all() or not is_local.any():
            return whole
        return replace(whole, local=whole._of_pieces(is_local), remote=whole._of_pieces(~is_local))

    def _of_pieces(self, chosen: Bool) -> "AttentionCall":
        def borders(cu_seqlens: Int32) -> Int32:
            lengths = np.diff(cu_seqlens)[chosen]
            return np.append(0, np.cumsum(lengths)).astype(np.int32)

        return AttentionCall.of(borders(self.cu_seqlens_q), borders(self.cu_seqlens_kv), self.left_window)

    def once(self, function: Callable[..., T], *arguments: Hashable) -> T:
        """Return function(self, *arguments), cached because every layer needs the same result."""
        key = (function, *arguments)
        if key not in self.cache:
            self.cache[key] = function(self, *arguments)
        result: T = self.cache[key]
        return result

    @property
    def window_size(self) -> tuple[int, int]:
        """FlashAttention's (left, right): causal, with all keys to the left (-1) or `left_window` of them."""
        return (-1 if self.left_window is None else self.left_window, 0)

    @property
    def segments(self) -> int:
        """The number of segments, including empty ones."""
        return len(self.cu_seqlens_q) - 1

    @cached_property
    def max_seqlens(self) -> tuple[int, int]:
        """The largest number of queries and the largest number of keys of a segment."""
        return int(np.diff(self.cu_seqlens_q).max()), int(np.diff(self.cu_seqlens_kv).max())

    def run(self, attend: Attend, inputs: QKV, scale: float, expand: Expand | None = None) -> Tensor:
        """Return the attention output of this rank's queries, [t, N, W].

        With `expand`, ranks exchange keys and values before they are expanded; each rank expands what its queries see.
        """

        def expanded(inputs: QKV) -> QKV:
            if expand is None:
                return inputs
            key, value = expand(inputs.key_uGH, inputs.value_uGW)
            return inputs._replace(key_uGH=key, value_uGW=value)

        def by(call: AttentionCall) -> LocalAttention:
            return lambda local: attend(expanded(local), call, scale)

        match self.exchange:
            case None:
                return by(self)(inputs)
            case KeyExchange():
                return self.exchange.attend(inputs, by(self.local or self), by(self.remote or self))
            case HeadExchange():  # it exchanges heads, so keys and values are expanded first
                return self.exchange.attend(expanded(inputs), lambda local: attend(local, self, scale))
