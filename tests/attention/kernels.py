"""Calls, inputs and references for the tests of kernels: what a kernel computes, against the reference in float64."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_ext.attention import reference
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.context_parallel.exchange import QKV

Lengths = Sequence[tuple[int, int]]  # queries and keys of each segment


def call_of(lengths: Lengths, left_window: int | None = None) -> AttentionCall:
    """Make the call of these segments, on the CPU."""
    cu_q, cu_kv = np.cumsum([(0, 0), *lengths], axis=0, dtype=np.int32).T
    return AttentionCall.of(np.ascontiguousarray(cu_q), np.ascontiguousarray(cu_kv), left_window)


def inputs_of(
    call: AttentionCall, heads: int = 4, groups: int = 2, size: int = 16, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Draw queries, keys, values and the outputs' gradient, dense."""
    generator = torch.Generator().manual_seed(1)
    t, u = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1])
    shapes = [(t, heads), (u, groups), (u, groups), (t, heads)]
    return [torch.randn(*shape, size, generator=generator).to(dtype) for shape in shapes]


def results(attend: Attend, inputs: list[Tensor], call: AttentionCall) -> list[Tensor]:
    """The output and the gradients of queries, keys and values, and of the sinks if there is a fifth input."""
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], *inputs[4:])]
    out = attend(QKV(*leaves), call, inputs[0].shape[2] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def assert_right(attend: Attend, inputs: list[Tensor], call: AttentionCall, tolerance: float = 1e-5) -> None:
    """Compare a kernel's output and gradients with the reference's in float64."""
    names = ("out", "dq", "dk", "dv", "ds")[: len(inputs)]
    exact = results(reference.attend, [x.double() for x in inputs], call)
    for name, actual, want in zip(names, results(attend, inputs, call), exact, strict=True):
        assert actual.dtype == inputs[0].dtype
        torch.testing.assert_close(
            actual.double(), want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
