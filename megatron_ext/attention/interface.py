"""What a packed-attention backend is given: which queries see which keys, and where the keys come from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_ext.arrays import Bool, Int32
from megatron_ext.attention.exchange import ContextGroup, HeadExchange, KeyExchange, LocalAttention, pieces_at_home
from megatron_ext.context_parallel import CPPlan
from megatron_ext.device import moved
from megatron_ext.layout import PackedLayout

T = TypeVar("T")


class Scheme(StrEnum):
    """Says how context-parallel ranks share attention, by the names that `--cp-scheme` takes."""

    EXCHANGE = "exchange"
    ULYSSES = "ulysses"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Describes one call of packed attention: segment i's queries see segment i's keys, causal from the bottom right.

    With q queries and k >= q keys in a segment, query j sees the keys up to j + (k - q):

        q = 2, k = 4      keys  0 1 2 3
                   query 0      x x x .
                   query 1      x x x x

    and with a sliding window no further back than `reach` keys before that one.

    Attributes:
        cu_seqlens_q: int32 [S+1] on the host, the borders of the segments in the queries.
        cu_seqlens_kv: int32 [S+1] on the host, the borders of the segments in the keys and values.
        reach: tokens before itself that a query sees at most; None for its whole segment.
        exchange: how the tokens of other context-parallel ranks come in; None without context parallelism.
        borders: `cu_seqlens_q` and `cu_seqlens_kv` once more, on the device that computes.
        made: what `once` has computed.
        home, away: the same call for the pieces alone that need no other rank's keys, and for those alone that do;
            None where there are none of the other kind, or where no keys are exchanged.
    """

    cu_seqlens_q: Int32
    cu_seqlens_kv: Int32
    reach: int | None = None
    exchange: KeyExchange | HeadExchange | None = None
    borders: tuple[Tensor, Tensor] | None = None
    made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    home: AttentionCall | None = None
    away: AttentionCall | None = None

    @classmethod
    def of_layout(cls, layout: PackedLayout, reach: int | None = None) -> AttentionCall:
        """Make the call of a process that holds every token: each query sees its own segment."""
        return cls(layout.cu_seqlens, layout.cu_seqlens, reach)

    @classmethod
    def of_plan(cls, plan: CPPlan, context: ContextGroup, scheme: Scheme) -> AttentionCall:
        """Make the call of one context-parallel rank under either scheme."""
        if scheme is Scheme.ULYSSES:
            borders = plan.layout.cu_seqlens
            return cls(borders, borders, plan.reach, HeadExchange.of_plan(plan, context))
        mine = plan.rank(context.rank)
        whole = cls(mine.cu_seqlens_q, mine.cu_seqlens_kv, plan.reach, KeyExchange.of_plan(plan, context))
        home = pieces_at_home(mine)
        if home.all() or not home.any():
            return whole
        return replace(whole, home=whole._of_pieces(home), away=whole._of_pieces(~home))

    def _of_pieces(self, chosen: Bool) -> AttentionCall:
        """Make the call for some of the pieces alone."""
        counts = (np.diff(cu)[chosen] for cu in (self.cu_seqlens_q, self.cu_seqlens_kv))
        q, kv = (np.concatenate([[0], np.cumsum(count)]).astype(np.int32) for count in counts)
        return AttentionCall(q, kv, self.reach)

    def to(self, device: torch.device) -> AttentionCall:
        """Move what the device needs to it."""
        exchange = self.exchange.to(device) if self.exchange is not None else None
        q, kv = (moved(torch.from_numpy(cu), device) for cu in (self.cu_seqlens_q, self.cu_seqlens_kv))
        home, away = (part.to(device) if part is not None else None for part in (self.home, self.away))
        return replace(self, exchange=exchange, borders=(q, kv), home=home, away=away)

    def once(self, function: Callable[..., T], *arguments: Hashable) -> T:
        """Return function(self, *arguments), computed the first time alone: every layer asks the same."""
        key = (function, *arguments)
        if key not in self.made:
            self.made[key] = function(self, *arguments)
        result: T = self.made[key]
        return result

    @property
    def window_size(self) -> tuple[int, int]:
        """Flash attention's (left, right): causal, with all keys to the left (-1) or `reach` of them."""
        return (-1 if self.reach is None else self.reach, 0)

    @property
    def segments(self) -> int:
        """Count the segments, empty ones too."""
        return len(self.cu_seqlens_q) - 1

    @cached_property
    def max_seqlens(self) -> tuple[int, int]:
        """Queries and keys of the longest segments."""
        return int(np.diff(self.cu_seqlens_q).max()), int(np.diff(self.cu_seqlens_kv).max())

    def run(self, attend: Attend, query_tNH: Tensor, key_tGH: Tensor, value_tGH: Tensor, scale: float) -> Tensor:
        """Attend with this rank's queries to all that they see; [t, N, H]."""

        def by(call: AttentionCall) -> LocalAttention:
            return lambda query, key, value: attend(query, key, value, call, scale)

        match self.exchange:
            case None:
                return by(self)(query_tNH, key_tGH, value_tGH)
            case KeyExchange():
                home, away = by(self.home or self), by(self.away or self)
                return self.exchange.attend(query_tNH, key_tGH, value_tGH, home, away)
            case HeadExchange():
                return self.exchange.attend(query_tNH, key_tGH, value_tGH, by(self))


# (query [t, N, H], key [u, G, H], value [u, G, H], call, softmax scale) -> [t, N, H]
Attend = Callable[[Tensor, Tensor, Tensor, AttentionCall, float], Tensor]
