"""Context parallelism's one collective per layer: each rank gets the keys and values that its queries need.

The plan lists the rows; an uneven all-to-all moves them, its backward moves their gradients the other way.
Where the plan needs nothing from anyone, nothing is called.

    rank 0 holds  a0 a1 b0        its queries need  a0 a1 b0
    rank 1 holds  a2 b1 b2        its queries need  a0 a1 a2 | b0 b1 b2     receives a0 a1 b0

Legend: t tokens of this rank, u rows of the local call, r rows received, s rows sent, G key heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.context_parallel import RankPlan

Int64 = npt.NDArray[np.int64]


class Traffic:
    """Counts the bytes that this process sends to others through a context-parallel group."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def take(self) -> int:
        """The bytes since the last call."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """One rank's part of the exchange of a micro-batch's keys and values.

    Attributes:
        send_s: int64 [s], local rows to send, those for rank 0 first, then rank 1, ...
        send_counts: rows for each rank.
        receive_counts: rows from each rank.
        kv_rows_u: int64 [u], for each key row of the local call its place in (own rows, received rows).
        group: the context-parallel group.
        traffic: counts what is sent.
    """

    send_s: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    kv_rows_u: Tensor
    group: dist.ProcessGroup
    traffic: Traffic
    silent: bool

    @classmethod
    def of_plan(
        cls, rank_plan: RankPlan, silent: bool, group: dist.ProcessGroup, traffic: Traffic, device: torch.device
    ) -> KeyExchange:
        """The exchange that a plan asks of this rank; `silent`: no rank needs anything, so none calls."""
        return cls(
            send_s=torch.from_numpy(np.concatenate(rank_plan.send)).to(device),
            send_counts=tuple(len(rows) for rows in rank_plan.send),
            receive_counts=tuple(len(rows) for rows in rank_plan.receive),
            kv_rows_u=torch.from_numpy(rank_plan.kv_rows).to(device),
            group=group,
            traffic=traffic,
            silent=silent,
        )

    def gather(self, key_tGH: Tensor, value_tGH: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the local call, [u, G, H] each."""
        pool = torch.stack([key_tGH, value_tGH], dim=1)
        if not self.silent:
            received = _AllToAll.apply(
                pool.index_select(0, self.send_s), self.send_counts, self.receive_counts, self.group, self.traffic
            )
            pool = torch.cat([pool, received])
        call = pool.index_select(0, self.kv_rows_u)
        return call[:, 0], call[:, 1]


class _AllToAll(torch.autograd.Function):
    """Rows to and from each rank; backward returns the gradients to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_counts: tuple[int, ...],
        receive_counts: tuple[int, ...],
        group: dist.ProcessGroup,
        traffic: Traffic,
    ) -> Tensor:
        ctx.counts, ctx.group, ctx.traffic = (send_counts, receive_counts), group, traffic
        return _all_to_all(rows, send_counts, receive_counts, group, traffic)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.counts
        return _all_to_all(grads[0], received, sent, ctx.group, ctx.traffic), None, None, None, None


def _all_to_all(
    rows: Tensor,
    send_counts: tuple[int, ...],
    receive_counts: tuple[int, ...],
    group: dist.ProcessGroup,
    traffic: Traffic,
) -> Tensor:
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(receive_counts), list(send_counts), group=group)
    traffic.sent_bytes += rows.numel() * rows.element_size()
    return received
