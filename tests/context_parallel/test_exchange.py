"""The exchange of keys and values: when it sends, and the sums of its gradients; values are in test_shared_rows.py."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.attention.interface import AttentionCall
from megatron_ext.attention.reference import attend
from megatron_ext.context_parallel import plan
from megatron_ext.context_parallel.exchange import QKV, AsyncAllToAll, RowPicks, Scheme
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.layout import build_layout
from tests.launcher import call

HEAD_SIZE = 6
SCALE = 0.5


def events_of(rank: int) -> list[str]:
    """List what one of two ranks does in turn, forward and backward, with the key heads in two parts."""
    seen: list[str] = []
    move, land = AsyncAllToAll.move, AsyncAllToAll.finish

    def moving(transfer: AsyncAllToAll, *args: Any) -> Tensor:
        seen.append("send")
        return move(transfer, *args)

    def landing(transfer: AsyncAllToAll) -> None:
        seen.append("receive")
        land(transfer)

    AsyncAllToAll.move, AsyncAllToAll.finish = moving, landing  # type: ignore[method-assign]
    share = plan(build_layout(24, [1, 5, 6, 20, 24], 24), 2, "contiguous")
    call = AttentionCall.of_plan(share, CPGroup(rank, 2, dist.group.WORLD, parts=2), Scheme.EXCHANGE)

    def logged_attend(inputs: QKV, part: AttentionCall, scale: float) -> Tensor:
        seen.append(f"attend {len(inputs.query_tNH)}")
        out = attend(inputs, part, scale)
        out.register_hook(lambda grad: seen.append(f"back {len(grad)}"))
        return out

    shapes = [(12, heads, HEAD_SIZE) for heads in (8, 4, 4)]
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    call.run(logged_attend, QKV(query, key, value), SCALE).sum().backward()
    return seen


def test_local_pieces_are_computed_while_rows_travel() -> None:
    """Rank 0 holds documents of 1, 4, 1 and 6 tokens; rank 1 the other 8 of the last one, and one of 4."""
    local_only, local_and_remote = call(events_of, 2)
    assert ", ".join(local_only) == "send, send, attend 12, receive, receive, send, send, back 12, receive, receive"
    forward = ", ".join(local_and_remote[:7])
    backward = ", ".join(local_and_remote[7:])
    assert forward == "send, send, attend 4, receive, attend 8, receive, attend 8"
    assert backward == "back 8, send, back 8, send, back 4, receive, receive"


@pytest.mark.parametrize("picked", [[], [2], [0, 1, 2, 3], [3, 1, 1, 0, 3, 3]])
def test_gradients_of_rows_picked_several_times_add_up(picked: list[int]) -> None:
    rows = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    picks = RowPicks.of(np.array(picked, dtype=np.int64))
    indexed_rows = rows[picked] if picked else rows[:0]
    picked_rows = picks.of_rows(rows)
    assert torch.equal(picked_rows, indexed_rows)
    grad = torch.randn(indexed_rows.shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(indexed_rows, rows, grad)
    torch.testing.assert_close(torch.autograd.grad(picked_rows, rows, grad)[0], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("receivers", [2, 3, 8])
def test_gradients_of_many_receivers_are_rounded_once(receivers: int) -> None:
    """The rms error of bf16 gradients against float64 is the error of one rounding."""
    rows = torch.randn(512, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    picks = RowPicks.of(np.tile(np.arange(512), receivers))
    grad = torch.randn(receivers * 512, 2, 8, dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad(picks.of_rows(rows), rows, grad)
    exact = grad.double().unflatten(0, (receivers, 512)).sum(0)
    error, rounding = ((x.double() - exact).square().mean().sqrt() for x in (gradient, exact.bfloat16()))
    assert gradient.dtype == torch.bfloat16
    assert error <= 1.001 * rounding
