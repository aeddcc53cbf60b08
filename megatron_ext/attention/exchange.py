"""Context parallelism's one collective per layer: each rank gets the keys and values that its queries need.

The plan lists the rows; an uneven all-to-all moves them, its backward moves their gradients the other way.
Where the plan needs nothing from anyone, nothing is called. In several parts of the heads, a part is on its way
while the attention of the part before it is computed, forward and backward.

    rank 0 holds  a0 a1 b0        its queries need  a0 a1 | b0
    rank 1 holds  a2 b1 b2        its queries need  a0 a1 a2 | b0 b1 b2     so it receives a0 a1 b0

Legend: t tokens of this rank, u key rows of the local call, N query heads, G key heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.context_parallel import CPPlan

# (query [t, N, H], key [u, G, H], value [u, G, H]) -> [t, N, H], on this rank alone
LocalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Traffic:
    """Counts the bytes that this process sends to others through its context-parallel group."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def take(self) -> int:
        """Give the bytes since the last call."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent


@dataclass(frozen=True)
class ContextGroup:
    """Names the ranks that share the tokens of a row.

    Attributes:
        rank: this process's number among them.
        size: how many they are.
        group: their process group; None where the size is 1.
        traffic: counts what this process sends.
        parts: key heads are exchanged in up to so many parts, to overlap with attention.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    traffic: Traffic
    parts: int = 1

    def start(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Flight:
        """Send rows to and receive rows from each rank, those of rank 0 first; differentiable."""
        return Flight(rows, send_counts, receive_counts, self)

    def all_to_all(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Send and receive rows, and wait for them."""
        return self.start(rows, send_counts, receive_counts).wait()

    def gather(self, values_t: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather the values of all ranks, one rank after the other; rank r has counts[r] of them. Without gradient."""
        if self.size == 1:
            return values_t
        longest = max(counts)  # all_gather takes equal shapes
        mine = values_t.new_zeros(longest)
        mine[: len(values_t)] = values_t
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        self.traffic.sent_bytes += (self.size - 1) * longest * values_t.element_size()
        return torch.cat([values[:count] for values, count in zip(everyone, counts, strict=True)])


class Flight:
    """Carries rows on their way, from `ContextGroup.start` to `wait`.

    The two ends are two autograd functions with attention between them, so that computing and sending overlap in
    both directions: in backward the gradients set out where `wait` was called, and are awaited where the flight was
    started.
    """

    def __init__(self, rows: Tensor, send_counts: list[int], receive_counts: list[int], context: ContextGroup) -> None:
        self.send_counts, self.receive_counts, self.context = send_counts, receive_counts, context
        self.work: dist.Work | None = None
        self.gradients: Tensor | None = None
        self.received: Tensor | None = _Start.apply(rows, self)

    def wait(self) -> Tensor:
        """Give the rows received, [sum of receive_counts, ...], once they have come."""
        # the graph of what was received leads back here: kept, both would live until Python looks for such circles
        started, self.received = self.received, None
        received: Tensor = _Wait.apply(started, self)
        return received

    def move(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Start the collective; its result is there after `land`."""
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        context = self.context
        self.work = dist.all_to_all_single(
            received, rows.contiguous(), receive_counts, send_counts, group=context.group, async_op=True
        )
        to_others = len(rows) - send_counts[context.rank]
        context.traffic.sent_bytes += to_others * rows[:1].numel() * rows.element_size() if to_others else 0
        return received

    def land(self) -> None:
        """Wait for the collective that was started last."""
        assert self.work is not None
        self.work.wait()
        self.work = None


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """Says what one rank does in moving a micro-batch's keys and values to the queries that need them.

    Attributes:
        send_rows: int64, local rows to send, those for rank 0 first, then rank 1, ...
        send_counts: rows for each rank.
        receive_counts: rows from each rank.
        kv_rows_u: int64 [u], for each key row of the local call its place in (own rows, received rows).
        context: the ranks; None where no rank needs anything, so that none calls.
    """

    send_rows: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    kv_rows_u: Tensor
    context: ContextGroup | None

    @classmethod
    def of_plan(cls, plan: CPPlan, context: ContextGroup) -> KeyExchange:
        """List what the plan asks of this rank."""
        mine = plan.rank(context.rank)
        return cls(
            send_rows=torch.from_numpy(np.concatenate(mine.send)),
            send_counts=[len(rows) for rows in mine.send],
            receive_counts=[len(rows) for rows in mine.receive],
            kv_rows_u=torch.from_numpy(mine.kv_rows),
            context=context if plan.rows_moved.any() else None,
        )

    def to(self, device: torch.device) -> KeyExchange:
        """Move the indices to `device`."""
        return replace(self, send_rows=self.send_rows.to(device), kv_rows_u=self.kv_rows_u.to(device))

    def attend(self, query_tNH: Tensor, key_tGH: Tensor, value_tGH: Tensor, attend: LocalAttention) -> Tensor:
        """Fetch keys and values, then attend locally; [t, N, H]."""
        if self.context is None:  # every rank holds whole segments
            return attend(query_tNH, key_tGH, value_tGH)
        parts = math.gcd(self.context.parts, key_tGH.shape[1])  # each of as many key heads
        # keys and values travel as one tensor; all parts set out before the first is awaited
        owns = torch.stack([key_tGH, value_tGH], dim=1).chunk(parts, dim=2)
        flights = [
            self.context.start(own.index_select(0, self.send_rows), self.send_counts, self.receive_counts)
            for own in owns
        ]
        outputs = []
        for query, own, flight in zip(query_tNH.chunk(parts, dim=1), owns, flights, strict=True):
            key_u, value_u = torch.cat([own, flight.wait()]).index_select(0, self.kv_rows_u).unbind(dim=1)
            outputs.append(attend(query, key_u, value_u))
        return torch.cat(outputs, dim=1)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Ulysses (arXiv 2309.14509): every rank attends over all tokens with its share of the heads.

    Attributes:
        order_T: int64 [T], the tokens of rank 0, then of rank 1, ...
        natural_T: int64 [T], the inverse of `order_T`.
        context: the ranks.
    """

    order_T: Tensor
    natural_T: Tensor
    context: ContextGroup

    @classmethod
    def of_plan(cls, plan: CPPlan, context: ContextGroup) -> HeadExchange:
        """Make the exchange for the plan's assignment of tokens."""
        order = np.concatenate(list(plan.rows))
        return cls(torch.from_numpy(order), torch.from_numpy(np.argsort(order)), context)

    def to(self, device: torch.device) -> HeadExchange:
        """Move the indices to `device`."""
        return replace(self, order_T=self.order_T.to(device), natural_T=self.natural_T.to(device))

    def attend(self, query_tNH: Tensor, key_tGH: Tensor, value_tGH: Tensor, attend: LocalAttention) -> Tensor:
        """Trade tokens for heads, attend over all tokens, trade back; [t, N, H]."""
        query, key, value = (self._all_tokens(x) for x in (query_tNH, key_tGH, value_tGH))
        return self._own_tokens(attend(query, key, value))

    def _all_tokens(self, x_tNH: Tensor) -> Tensor:
        """Trade this rank's tokens of all heads for all tokens of its heads: [t, N, H] -> [T, N/cp, H]."""
        size, t = self.context.size, len(x_tNH)
        by_rank = x_tNH.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)
        return self.context.all_to_all(by_rank, [t] * size, [t] * size).index_select(0, self.natural_T)

    def _own_tokens(self, x_TNH: Tensor) -> Tensor:
        """Trade back: [T, N/cp, H] -> [t, N, H]."""
        size, t = self.context.size, len(x_TNH) // self.context.size
        by_rank = self.context.all_to_all(x_TNH.index_select(0, self.order_T), [t] * size, [t] * size)
        return by_rank.unflatten(0, (size, t)).transpose(0, 1).flatten(1, 2)


class _Start(torch.autograd.Function):
    """Sends rows out in forward; in backward their gradients, on the way since `_Wait`'s, have come."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.move(rows, flight.send_counts, flight.receive_counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:
        flight: Flight = ctx.flight
        flight.land()
        gradients, flight.gradients = flight.gradients, None
        return gradients, None


class _Wait(torch.autograd.Function):
    """Receives the rows in forward; in backward their gradients set out to where they came from."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.land()
        return received.view_as(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flight: Flight = ctx.flight
        flight.gradients = flight.move(grads[0], flight.receive_counts, flight.send_counts)
        return grads[0], None  # of the right shape; `_Start` returns what has come in its stead
