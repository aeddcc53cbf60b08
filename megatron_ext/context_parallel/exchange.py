"""Exchange keys and values between context-parallel ranks: one collective per layer.

The plan lists the rows that each rank needs; an uneven all-to-all moves them, and its backward returns their gradients.
If no rank needs anything, there is no collective.

    rank 0 holds  a0 a1 b0        its queries need  a0 a1 | b0
    rank 1 holds  a2 b1 b2 c0     its queries need  a0 a1 a2 | b0 b1 b2 | c0     so it receives a0 a1 b0

A piece that needs only keys of its own rank (a0 a1 and b0; c0) is *local*, the others are *remote*. Attention of local
pieces is computed while rows are in transit, then attention of remote pieces. The heads can be split into parts, so
that one part is in transit while another is computed. Backward runs in reverse: gradients are sent once the remote
pieces are done, and the local pieces are computed while they travel.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext.arrays import Int64
from megatron_ext.context_parallel import RankPlan
from megatron_ext.context_parallel.group import CPGroup


class Scheme(StrEnum):
    """Ways in which context-parallel ranks share attention; the values of `--cp-scheme`."""

    EXCHANGE = "exchange"
    ULYSSES = "ulysses"


def copies_of_keys(key_heads: int, ranks: int) -> int:
    """Return how many ranks get the same key head under Ulysses."""
    return max(ranks // key_heads, 1)


def heads_can_be_exchanged(heads: int, key_heads: int, ranks: int) -> bool:
    """Return whether Ulysses can give every rank as many heads, and the key heads that its queries use."""
    return heads % ranks == 0 and key_heads * copies_of_keys(key_heads, ranks) % ranks == 0


class QKV(NamedTuple):
    """Queries, keys and values of packed rows; G divides N."""

    query_tNH: Tensor
    key_uGH: Tensor
    value_uGW: Tensor  # `PerCall` makes W and H equal for kernels that need it
    # for each query head, the logit of one more softmax entry, which adds nothing to the output; None for a plain
    # softmax
    sink_N: Tensor | None = None


LocalAttention = Callable[[QKV], Tensor]  # returns [t, N, W], on this rank alone


class AsyncAllToAll:
    """A differentiable all-to-all of rows, ordered by rank; it is in progress until `wait`.

    Start and wait are two autograd functions, so that the computation between them overlaps with communication in both
    directions: backward starts sending gradients at `wait` and waits for them at `start`.
    """

    def __init__(self, rows: Tensor, send_counts: list[int], receive_counts: list[int], context: CPGroup) -> None:
        self.send_counts = send_counts
        self.receive_counts = receive_counts
        self.context = context
        self.work: dist.Work | None = None
        self.gradients: Tensor | None = None
        self.received: Tensor | None = _Start.apply(rows, self)

    def wait(self) -> Tensor:
        """Wait for and return the received rows, [sum of receive_counts, ...]."""
        # drop the reference: the graph of the received rows refers to this object, a cycle that only the GC would free
        started = self.received
        self.received = None
        received: Tensor = _Wait.apply(started, self)
        return received

    def move(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Start the collective; its result is valid after `finish`."""
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        context = self.context
        self.work = dist.all_to_all_single(
            received, rows.contiguous(), receive_counts, send_counts, group=context.group, async_op=True
        )
        to_others = len(rows) - send_counts[context.rank]
        context.sent_bytes += to_others * rows[:1].numel() * rows.element_size()
        return received

    def finish(self) -> None:
        """Wait for the collective started last."""
        assert self.work is not None
        self.work.wait()
        self.work = None


@dataclass(frozen=True, eq=False)
class RowPicks:
    """A gather of rows, possibly with repeats, whose backward adds gradients in a fixed order."""

    rows_u: Tensor  # int64 [u], the rows to gather
    order_u: Tensor  # int64 [u], a stable argsort of `rows_u`
    distinct_d: Tensor  # int64 [d], the distinct rows, ascending
    times_d: Tensor  # int64 [d], how often each occurs
    most: int  # the largest of these; more than two gradients are added in fp32

    @classmethod
    def of(cls, rows: Int64) -> "RowPicks":
        order = np.argsort(rows, kind="stable")
        first = np.flatnonzero(np.diff(rows[order], prepend=-1))  # of each distinct row in the sorted ones
        times = np.diff(first, append=len(rows))
        rows_u, order_u, distinct_d, times_d = map(torch.from_numpy, (rows, order, rows[order][first], times))
        return cls(rows_u, order_u, distinct_d, times_d, int(times.max(initial=0)))

    def inverse(self) -> "RowPicks":
        """Return the inverse of a permutation."""
        return replace(self, rows_u=self.order_u, order_u=self.rows_u)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return the gathered rows, [u, ...]; differentiable."""
        picked: Tensor = _Pick.apply(rows, self)
        return picked


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """One rank's part in exchanging the keys and values of a micro-batch."""

    sends: RowPicks  # own rows to send, ordered by destination rank
    send_counts: list[int]  # rows to each rank
    receive_counts: list[int]  # rows from each rank
    kept_rows: Tensor  # int64, own rows that remote pieces see, ascending
    kv_picks: RowPicks  # for each key row of the remote pieces, its index in (kept rows, received rows)
    # lengths of the alternating runs of local and remote own rows, starting with local; the first and the last may be 0
    runs: list[int]
    context: CPGroup

    @classmethod
    def of_rank(cls, plan: RankPlan, context: CPGroup) -> "KeyExchange":
        is_local = plan.is_local
        changes = np.flatnonzero(np.diff(is_local, prepend=True, append=not is_local[-1]))
        runs = np.diff(plan.cu_seqlens_q[changes], prepend=0).tolist()
        remote_rows = plan.kv_rows[np.repeat(~is_local, np.diff(plan.cu_seqlens_kv))]
        rows_held = int(plan.cu_seqlens_q[-1])
        is_held = remote_rows < rows_held
        kept = np.unique(remote_rows[is_held])
        received = remote_rows - rows_held + len(kept)
        places = np.where(is_held, np.searchsorted(kept, remote_rows), received)
        return cls(
            sends=RowPicks.of(np.concatenate(plan.rows_sent)),
            send_counts=[len(rows) for rows in plan.rows_sent],
            receive_counts=[len(rows) for rows in plan.tokens_received],
            kept_rows=torch.from_numpy(kept),
            kv_picks=RowPicks.of(places),
            runs=runs + [0] * (len(runs) % 2),
            context=context,
        )

    def attend(self, inputs: QKV, attend_local: LocalAttention, attend_remote: LocalAttention) -> Tensor:
        """Compute local and remote pieces; return the attention output of this rank's queries, [t, N, W]."""
        query_tNH, key_tGH, value_tGW, sink_N = inputs
        parts = math.gcd(self.context.parts, key_tGH.shape[1])  # each part has the same number of key heads
        # keys and values are sent as one tensor; all parts are started before anything is computed
        rows_of_parts = torch.cat([key_tGH, value_tGW], dim=-1).chunk(parts, dim=1)
        transfers = [
            AsyncAllToAll(self.sends.of_rows(rows), self.send_counts, self.receive_counts, self.context)
            for rows in rows_of_parts
        ]
        query, key, value = (self._runs_of(x, 0) for x in (query_tNH, key_tGH, value_tGW))
        local = None
        if len(query):
            local = attend_local(QKV(query, key, value, sink_N))
        outputs = []
        sizes = (key_tGH.shape[-1], value_tGW.shape[-1])
        queries = self._runs_of(query_tNH, 1).chunk(parts, dim=1)
        sinks: Sequence[Tensor | None] = [None] * parts
        if sink_N is not None:
            sinks = sink_N.chunk(parts)
        for query, rows, transfer, sink in zip(queries, rows_of_parts, transfers, sinks, strict=True):
            kept = rows
            if len(self.kept_rows) < len(rows):
                kept = rows.index_select(0, self.kept_rows)
            kept_and_received = torch.cat([kept, transfer.wait()])
            if len(query):
                key_u, value_u = self.kv_picks.of_rows(kept_and_received).split(sizes, dim=-1)
                outputs.append(attend_remote(QKV(query, key_u, value_u, sink)))
            else:  # nothing was received, but backward must still receive the gradients of the rows sent
                assert local is not None
                outputs.append(kept_and_received.reshape(*query.shape[:2], local.shape[-1]))
        remote = _joined(outputs, dim=1)
        if local is None:
            return remote
        pairs = zip(local.split(self.runs[::2]), remote.split(self.runs[1::2]), strict=True)
        return torch.cat([run for pair in pairs for run in pair])

    def _runs_of(self, x_t: Tensor, first: int) -> Tensor:
        """Return the local (first 0) or remote (first 1) rows, without a copy if they are one run."""
        runs = x_t.split(self.runs)[first::2]
        filled = [run for run in runs if len(run)] or [runs[0]]
        return _joined(filled, dim=0)


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate tensors, without a copy if there is only one."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Ulysses (arXiv 2309.14509): every rank attends over all tokens with its share of the heads.

    If there are more ranks than key heads, several ranks get a copy of the same one; backward adds their gradients.
    """

    order: RowPicks  # the tokens of rank 0, then of rank 1, ..., a permutation of all T
    context: CPGroup

    def attend(self, inputs: QKV, attend: LocalAttention) -> Tensor:
        """Exchange tokens for heads, attend over all tokens, exchange back; [t, N, W]."""
        query_tNH, key_tGH, value_tGW, sink_N = inputs
        sink = None  # of this rank's share of the heads
        if sink_N is not None:
            sink = sink_N.chunk(self.context.size)[self.context.rank]
        copies = copies_of_keys(key_tGH.shape[1], self.context.size)
        if copies > 1:
            key_tGH = key_tGH.repeat_interleave(copies, dim=1)
            value_tGW = value_tGW.repeat_interleave(copies, dim=1)
        transfers = [self._send_heads(x_tNH) for x_tNH in (query_tNH, key_tGH, value_tGW)]  # all before the first wait
        query, key, value = [self.order.inverse().of_rows(transfer.wait()) for transfer in transfers]
        return self._own_tokens(attend(QKV(query, key, value, sink)))

    def _send_heads(self, x_tNH: Tensor) -> AsyncAllToAll:
        """Start exchanging own tokens of all heads for all tokens of own heads: [t, N, H] -> [T, N/cp, H], by rank."""
        size = self.context.size
        counts = [len(x_tNH)] * size
        by_rank = x_tNH.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)
        return AsyncAllToAll(by_rank, counts, counts, self.context)

    def _own_tokens(self, x_TNH: Tensor) -> Tensor:
        """Exchange back: [T, N/cp, H] -> [t, N, H]."""
        size = self.context.size
        counts = [len(x_TNH) // size] * size
        by_rank = AsyncAllToAll(self.order.of_rows(x_TNH), counts, counts, self.context).wait()
        return by_rank.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


class _Start(torch.autograd.Function):
    """Starts the all-to-all in forward; waits for the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        return transfer.move(rows, transfer.send_counts, transfer.receive_counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:
        transfer: AsyncAllToAll = ctx.transfer
        transfer.finish()
        gradients = transfer.gradients
        transfer.gradients = None
        return gradients, None


class _Wait(torch.autograd.Function):
    """Waits for the rows in forward; starts sending their gradients back in backward."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.finish()
        return received.view_as(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        transfer: AsyncAllToAll = ctx.transfer
        transfer.gradients = transfer.move(grads[0], transfer.receive_counts, transfer.send_counts)
        return grads[0], None  # only the shape matters; `_Start` returns the gradients received


class _Pick(torch.autograd.Function):
    """Implements `RowPicks.of_rows` with a deterministic backward.

    The backward of torch's `index_select` adds gradients with atomics, in any order.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, picks: RowPicks) -> Tensor:
        ctx.picks = picks
        ctx.count = len(rows)
        return rows.index_select(0, picks.rows_u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_u,) = grads
        picks: RowPicks = ctx.picks
        if picks.most == 1 and len(grad_u) == ctx.count:  # a permutation
            return grad_u.index_select(0, picks.order_u), None
        gradient = grad_u.new_zeros((ctx.count, *grad_u.shape[1:]))
        if not len(grad_u):
            return gradient, None
        # The sum of two is rounded once in any precision. For more, the two halves of each row are added one after the
        # other, which halves the memory of their copies in fp32.
        dtype = gradient.dtype
        parts = 1
        if picks.most > 2 and grad_u.element_size() < 4:
            dtype = torch.float32
            parts = 2
        for sums, part_u in zip(*(x.flatten(1).chunk(parts, dim=1) for x in (gradient, grad_u)), strict=True):
            ordered_u = part_u.index_select(0, picks.order_u)
            # unsafe=True: torch does not copy the lengths to the host to check their sum
            sums_d = torch.segment_reduce(ordered_u.to(dtype), "sum", lengths=picks.times_d, unsafe=True)
            sums.index_copy_(0, picks.distinct_d, sums_d.to(gradient.dtype))
        return gradient, None
