"""What a packed-attention backend is given, and how one is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_ext.attention.exchange import ContextGroup, HeadExchange, KeyExchange
from megatron_ext.attention.reference import reference_attention
from megatron_ext.context_parallel import CPPlan
from megatron_ext.errors import UserError
from megatron_ext.layout import PackedLayout

logger = logging.getLogger(__name__)

Int32 = npt.NDArray[np.int32]


class Scheme(str, Enum):
    """How context-parallel ranks share attention, by the names that `--cp-scheme` takes."""

    EXCHANGE = "exchange"
    ULYSSES = "ulysses"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Which queries see which keys: segment i's queries see segment i's keys, causal from the bottom right.

    With q queries and k >= q keys in a segment, query j sees the keys up to j + (k - q):

        q = 2, k = 4      keys  0 1 2 3
                   query 0      x x x .
                   query 1      x x x x

    Attributes:
        cu_seqlens_q: int32 [S+1] on the host, the borders of the segments in the queries.
        cu_seqlens_kv: int32 [S+1] on the host, the borders of the segments in the keys and values.
        exchange: how the tokens of other context-parallel ranks come in; None without context parallelism.
    """

    cu_seqlens_q: Int32
    cu_seqlens_kv: Int32
    exchange: KeyExchange | HeadExchange | None = None

    @classmethod
    def of_layout(cls, layout: PackedLayout) -> AttentionCall:
        """The call of a process that holds every token: each query sees its own segment."""
        return cls(layout.cu_seqlens, layout.cu_seqlens)

    @classmethod
    def of_plan(cls, plan: CPPlan, context: ContextGroup, scheme: Scheme) -> AttentionCall:
        """The call of one context-parallel rank under either scheme."""
        if scheme is Scheme.ULYSSES:
            borders = plan.layout.cu_seqlens
            return cls(borders, borders, HeadExchange.of_plan(plan, context))
        mine = plan.rank(context.rank)
        return cls(mine.cu_seqlens_q, mine.cu_seqlens_kv, KeyExchange.of_plan(plan, context))

    def to(self, device: torch.device) -> AttentionCall:
        """The same call with what the device needs on it."""
        return replace(self, exchange=self.exchange.to(device)) if self.exchange is not None else self

    def run(self, backend: Backend, query_tNH: Tensor, key_tGH: Tensor, value_tGH: Tensor, scale: float) -> Tensor:
        """Attention of this rank's queries over all that they see; [t, N, H]."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return backend(query, key, value, self, scale)

        if self.exchange is None:
            return attend(query_tNH, key_tGH, value_tGH)
        return self.exchange.attend(query_tNH, key_tGH, value_tGH, attend)


# (query [t, heads, size], key [u, groups, size], value [u, groups, size], call, softmax scale) -> [t, heads, size]
Backend = Callable[[Tensor, Tensor, Tensor, AttentionCall, float], Tensor]


class BackendName(str, Enum):
    """The backends, by the names that `--attention-backend` takes."""

    REFERENCE = "reference"


_BACKENDS: dict[BackendName, Backend] = {
    BackendName.REFERENCE: lambda q, k, v, call, scale: reference_attention(
        q, k, v, call.cu_seqlens_q, call.cu_seqlens_kv, scale
    )
}


def select(name: str, device: torch.device) -> Backend:
    """Choose the backend and say so once.

    Raises:
        UserError: no such backend.
    """
    chosen = BackendName.REFERENCE if name == "auto" else name
    try:
        backend = _BACKENDS[BackendName(chosen)]
    except ValueError:
        names = ", ".join(["auto"] + [b.value for b in BackendName])
        raise UserError(f"attention_backend: got {name!r}, needs one of {names}") from None
    logger.info("attention backend: %s on %s", BackendName(chosen).value, device.type)
    return backend
