"""Both exchanges with real processes: output and gradients of the whole row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launcher import call
from torch import Tensor

from megatron_ext.attention.exchange import AsyncAllToAll, ContextGroup, KeyExchange, RowPicks, Traffic
from megatron_ext.attention.interface import AttentionCall, Scheme
from megatron_ext.attention.reference import attend, reference_attention
from megatron_ext.context_parallel import CPPlan, plan
from megatron_ext.layout import build_layout, concatenate

HEAD_SIZE = 6
SCALE = 0.5
NAMES = ("out", "dq", "dk", "dv")

LAYOUTS = {
    "one segment": build_layout(24, [], 24),
    "one segment of odd shares": build_layout(20, [], 20),
    "documents": build_layout(24, [1, 5, 6, 20, 24], 24),
    "window and documents": build_layout(24, [1, 9, 23], 5),
    "one token per segment": build_layout(24, [], 1),
    "shares of whole segments": build_layout(24, [], 6),
    "two ranks of four exchange": build_layout(24, [3, 8, 12, 18], 24),
    "two rows": concatenate([build_layout(12, [4], 12), build_layout(12, [1, 11], 8)]),
    "three rows": concatenate([build_layout(8, [], 8)] * 3),
    "one token per rank": build_layout(4, [], 4),
}


@dataclass(frozen=True)
class Case:
    layout: str
    policy: str
    scheme: Scheme
    heads: int
    groups: int
    left_window: int | None = None
    dtype: torch.dtype = torch.float32

    def plan(self, size: int) -> CPPlan:
        return plan(LAYOUTS[self.layout], size, self.policy, left_window=self.left_window)

    def whole(self) -> list[Tensor]:
        """q, k, v and the output's gradient of all tokens, in the case's dtype."""
        generator = torch.Generator().manual_seed(3)
        tokens = LAYOUTS[self.layout].tokens
        shapes = [(tokens, heads, HEAD_SIZE) for heads in (self.heads, self.groups, self.groups, self.heads)]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]


POLICIES = ("contiguous", "zigzag", "balanced", "auto")


def cases(policy: str) -> Iterator[Case]:
    for layout in LAYOUTS:
        for scheme in Scheme:
            yield Case(layout, policy, scheme, 8, 4)
            yield Case(layout, policy, scheme, 8, 4, dtype=torch.bfloat16)
        for left_window in (0, 3):
            yield Case(layout, policy, Scheme.EXCHANGE, 8, 4, left_window)
        yield Case(layout, policy, Scheme.ULYSSES, 4, 4, left_window=2)
        yield Case(layout, policy, Scheme.EXCHANGE, 3, 1)


def one_rank(rank: int, todo: list[Case]) -> list[dict[str, Any]]:
    """What this rank holds of the output and of the gradients, and the bytes that it counted."""
    seen: list[dict[str, Any]] = []
    for case in todo:
        size, traffic = dist.get_world_size(), Traffic()
        try:
            share = case.plan(size)
        except Exception as error:  # the same on every rank: a plan asks nobody
            seen.append({"refused": repr(error)})
            continue
        context = ContextGroup(rank, size, dist.group.WORLD, traffic)
        call = AttentionCall.of_plan(share, context, case.scheme).to(torch.device("cpu"))
        query, key, value, grad = (x[share.rows[rank]] for x in case.whole())
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out = call.run(attend, *leaves, SCALE)
        forward = traffic.take()
        out.backward(grad)
        seen.append(
            dict(zip(NAMES, (out.detach(), *(x.grad for x in leaves)), strict=True))
            | {"forward": forward, "backward": traffic.take()}
        )
    return seen


Seen = dict[Case, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest) -> Seen:
    """For every case what each of the processes saw; they are started once."""
    todo = [case for policy in POLICIES for case in cases(policy)]
    ranks = call(one_rank, request.param, todo, timeout_s=300)
    return {case: [rank[number] for rank in ranks] for number, case in enumerate(todo)}


def dense(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of the whole row from a dense mask, computed in `dtype`; float64."""
    return _dense(replace(case, policy="auto", scheme=Scheme.EXCHANGE), dtype)


@cache
def _dense(case: Case, dtype: torch.dtype) -> list[Tensor]:
    layout, left_window = LAYOUTS[case.layout], case.left_window
    place = torch.arange(layout.tokens)
    segment = torch.from_numpy(np.repeat(np.arange(layout.segments), layout.lengths))
    distance = place[:, None] - place
    visible = (segment[:, None] == segment) & (distance >= 0)
    if left_window is not None:
        visible &= distance <= left_window
    query, key, value, grad = (x.to(dtype) for x in case.whole())
    leaves = [x.requires_grad_() for x in (query, key, value)]
    key, value = (x.repeat_interleave(case.heads // case.groups, dim=1) for x in leaves[1:])
    scores = torch.einsum("tnh,unh->ntu", query, key) * SCALE
    out = torch.einsum("ntu,unh->tnh", torch.softmax(scores.masked_fill(~visible, -torch.inf), -1), value)
    out.backward(grad)
    return [x.double() for x in (out.detach(), *(x.grad for x in leaves if x.grad is not None))]


def joined(case: Case, ranks: list[dict[str, Any]], name: str) -> Tensor:
    """The parts of all ranks, in the order of the tokens."""
    share = case.plan(len(ranks))
    whole = torch.cat([rank[name] for rank in ranks])
    return whole[np.argsort(np.concatenate(list(share.rows)))].double()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scheme", Scheme)
def test_output_and_gradients_are_those_of_the_whole_row(seen: Seen, policy: str, scheme: Scheme) -> None:
    checked = 0
    for case, ranks in seen.items():
        if (case.policy, case.scheme) != (policy, scheme):
            continue
        assert "refused" not in ranks[0], (case, ranks[0])
        exact = dense(case, torch.float64)
        low = dense(case, case.dtype)
        for number, name in enumerate(NAMES):
            error = float((joined(case, ranks, name) - exact[number]).abs().max())
            if case.dtype == torch.bfloat16:  # at most twice what a dense softmax in bfloat16 is off
                assert ranks[0][name].dtype == torch.bfloat16
                limit = 2 * float((low[number] - exact[number]).abs().max()) + 1e-3
            else:
                limit = 1e-5 * max(1.0, float(exact[number].abs().max()))
            assert error <= limit, (case, name, error, limit)
        checked += 1
    assert checked >= 3 * len(LAYOUTS)


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_the_plans(seen: Seen, policy: str) -> None:
    """Each rank counts what it sends: keys and values forward, what it received again backward."""
    for case, ranks in seen.items():
        if case.policy != policy:
            continue
        assert "refused" not in ranks[0], (case, ranks[0])
        share, size = case.plan(len(ranks)), len(ranks)
        for number, rank in enumerate(ranks):
            if case.scheme is Scheme.ULYSSES:  # queries, keys, values and outputs of the other ranks' heads
                heads = 2 * (case.heads + case.groups) * len(share.rows[number]) * (size - 1) // size
                forward = backward = heads * HEAD_SIZE * case.dtype.itemsize
            else:
                row = 2 * case.groups * HEAD_SIZE * case.dtype.itemsize
                forward, backward = (int(share.rows_moved.sum(axis=axis)[number]) * row for axis in (1, 0))
            assert (rank["forward"], rank["backward"]) == (forward, backward), (case, number)


def test_without_moved_rows_no_process_group_is_needed() -> None:
    """Without any process group a collective would raise."""
    assert not dist.is_initialized()
    share = plan(build_layout(12, [3], 6), 2, "contiguous")
    assert not share.rows_moved.any()
    for rank in range(2):
        exchange = KeyExchange.of_plan(share, ContextGroup(rank, 2, None, Traffic()))
        assert exchange.context is None
        query, key = torch.randn(6, 2, HEAD_SIZE), torch.randn(6, 1, HEAD_SIZE)
        call = AttentionCall.of_plan(share, ContextGroup(rank, 2, None, Traffic()), Scheme.EXCHANGE)
        out = call.run(attend, query, key, key, SCALE)
        cu = call.cu_seqlens_q
        assert torch.equal(out, reference_attention(query, key, key, cu, cu, SCALE))


def test_the_nearest_layout_that_moves_something_needs_the_group() -> None:
    share = plan(build_layout(12, [3], 7), 2, "contiguous")
    assert share.rows_moved.sum() == 3  # tokens 3, 4 and 5
    call = AttentionCall.of_plan(share, ContextGroup(1, 2, None, Traffic()), Scheme.EXCHANGE)
    query = torch.randn(6, 1, HEAD_SIZE)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        call.run(attend, query, query, query, SCALE)


def events_of(rank: int) -> list[str]:
    """What one of two ranks does in turn, forward and backward, with the key heads in two parts."""
    seen: list[str] = []
    move, land = AsyncAllToAll.move, AsyncAllToAll.finish

    def moving(transfer: AsyncAllToAll, *args: Any) -> Tensor:
        seen.append("send")
        return move(transfer, *args)

    def landing(transfer: AsyncAllToAll) -> None:
        seen.append("receive")
        land(transfer)

    AsyncAllToAll.move, AsyncAllToAll.finish = moving, landing  # type: ignore[method-assign]
    share = plan(LAYOUTS["documents"], 2, "contiguous")
    call = AttentionCall.of_plan(share, ContextGroup(rank, 2, dist.group.WORLD, Traffic(), parts=2), Scheme.EXCHANGE)

    def logged_attend(query: Tensor, key: Tensor, value: Tensor, part: AttentionCall, *rest: Any) -> Tensor:
        seen.append(f"attend {len(query)}")
        out = attend(query, key, value, part, *rest)
        out.register_hook(lambda grad: seen.append(f"back {len(grad)}"))
        return out

    shapes = [(12, heads, HEAD_SIZE) for heads in (8, 4, 4)]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    call.run(logged_attend, query, key, value, SCALE).sum().backward()
    return seen


def test_local_pieces_are_computed_while_rows_travel() -> None:
    """Rank 0 holds documents of 1, 4, 1 and 6 tokens; rank 1 the other 8 of the last one, and one of 4."""
    local_only, both = call(events_of, 2)
    assert local_only == [
        *("send", "send", "attend 12", "receive", "receive"),
        *("send", "send", "back 12", "receive", "receive"),
    ]
    assert both == [
        *("send", "send", "attend 4", "receive", "attend 8", "receive", "attend 8"),
        *("back 8", "send", "back 8", "send", "back 4", "receive", "receive"),
    ]


@pytest.mark.parametrize("picked", [[], [2], [0, 1, 2, 3], [3, 1, 1, 0, 3, 3]])
def test_gradients_of_rows_picked_several_times_add_up(picked: list[int]) -> None:
    rows = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    picks = RowPicks.of(np.array(picked, dtype=np.int64)).to(torch.device("cpu"))
    theirs = rows[picked] if picked else rows[:0]
    ours = picks.of_rows(rows)
    assert torch.equal(ours, theirs)
    grad = torch.randn(theirs.shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(theirs, rows, grad)
    torch.testing.assert_close(torch.autograd.grad(ours, rows, grad)[0], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("receivers", [2, 3, 8])
def test_gradients_of_many_receivers_are_rounded_once(receivers: int) -> None:
    """The rms error of bf16 gradients against float64 is that of one rounding."""
    rows = torch.randn(512, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    picks = RowPicks.of(np.tile(np.arange(512), receivers)).to(torch.device("cpu"))
    grad = torch.randn(receivers * 512, 2, 8, dtype=torch.bfloat16)
    (got,) = torch.autograd.grad(picks.of_rows(rows), rows, grad)
    exact = grad.double().unflatten(0, (receivers, 512)).sum(0)
    error, rounding = ((x.double() - exact).square().mean().sqrt() for x in (got, exact.bfloat16()))
    assert got.dtype == torch.bfloat16
    assert error <= 1.001 * rounding


def test_local_and_remote_calls_cover_the_pieces_once() -> None:
    """Each query once, with the keys of its piece; where all pieces are of one kind there is one call, as ever."""
    kinds = set()
    for (name, layout), policy, size in itertools.product(LAYOUTS.items(), POLICIES, (2, 4)):
        share = plan(layout, size, policy)
        for rank in range(size):
            whole = AttentionCall.of_plan(share, ContextGroup(rank, size, None, Traffic()), Scheme.EXCHANGE)
            parts = [part for part in (whole.local, whole.remote) if part is not None]
            kinds.add(len(parts))
            assert len(parts) in (0, 2), (name, policy, rank)
            if parts:
                pieces = [np.stack([np.diff(c.cu_seqlens_q), np.diff(c.cu_seqlens_kv)], 1).tolist() for c in parts]
                assert all(q == kv for q, kv in pieces[0])
                assert all(q < kv for q, kv in pieces[1])
                both = np.stack([np.diff(whole.cu_seqlens_q), np.diff(whole.cu_seqlens_kv)], 1).tolist()
                assert sorted(pieces[0] + pieces[1]) == sorted(both)
    assert kinds == {0, 2}
