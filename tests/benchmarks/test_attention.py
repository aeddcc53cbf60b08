"""benchmarks/attention.py: its yardstick passes a flash kernel's rounding and nothing wrong; where errors are noted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_file import load
from torch import Tensor

from megatron_ext.attention.backends import Backend
from megatron_ext.attention.interface import AttentionCall

ROOT = Path(__file__).resolve().parents[2]

if torch.cuda.is_available():
    pytest.skip("emulates a kernel on the CPU", allow_module_level=True)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load(ROOT / "benchmarks" / "attention.py", monkeypatch)  # pytest calls a folder of tests `attention` too


def flash(wrong: float = 0.0) -> Callable[..., Tensor]:
    """A kernel that rounds as flash attention does: P and dS to bf16, all sums in fp32; `wrong` scales its dS."""

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scale: float) -> Tensor:
            group = query.shape[1] // key.shape[1]
            q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
            k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
            (t, u), segment = (len(query), len(key)), []
            for cu in (call.cu_seqlens_q, call.cu_seqlens_kv):
                segment.append(torch.from_numpy(np.repeat(np.arange(len(cu) - 1), np.diff(cu))))
            last = torch.arange(t) - torch.from_numpy(call.cu_seqlens_q[1:])[segment[0]]
            last += torch.from_numpy(call.cu_seqlens_kv[1:])[segment[0]]
            seen = (segment[0][:, None] == segment[1]) & (torch.arange(u) <= last[:, None])
            if call.left_window is not None:
                seen &= torch.arange(u) >= (last - call.left_window)[:, None]
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
            weights = scores.softmax(-1)
            out = (weights.bfloat16().float() @ v).bfloat16()
            ctx.save_for_backward(q, k, v, weights, out)
            ctx.group, ctx.scale = group, scale
            return out.transpose(0, 1)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, weights, out = ctx.saved_tensors
            grad = grads[0].transpose(0, 1).float()
            dv = (weights.bfloat16().float().transpose(1, 2) @ grad).bfloat16()
            rows = (grad * out.float()).sum(-1, keepdim=True)
            ds = (weights * (grad @ v.transpose(1, 2) - rows) * (1 + wrong)).bfloat16().float()
            dq = (ds @ k * ctx.scale).bfloat16()
            dk = (ds.transpose(1, 2) @ q * ctx.scale).bfloat16()
            of_keys = (x.unflatten(0, (-1, ctx.group)).sum(1).transpose(0, 1) for x in (dk, dv))
            return dq.transpose(0, 1), *of_keys, None, None

    def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scale: float) -> Tensor:
        out: Tensor = Flash.apply(query, key, value, call, scale)
        return out

    return attend


def test_the_yardstick_rounds_its_products(benchmark: Any) -> None:
    (reference,) = (b for b in benchmark.BACKENDS if b.name == "reference")
    cu = np.array([0, 256], dtype=np.int32)
    given = benchmark.inputs(benchmark.Case("one", cu, cu, heads=2), torch.bfloat16)
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    with benchmark.plain_products():
        plain, *_ = benchmark.run(reference, benchmark.Case("one", cu, cu, heads=2), torch.bfloat16, given)
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == before
    query, key, value = (x.transpose(0, 1) for x in given[:3])
    scores = (query * 8**-0.5) @ (key * 8**-0.5).transpose(1, 2)  # torch scales both sides
    scores = scores.masked_fill(torch.ones(256, 256, dtype=torch.bool).triu(1), -torch.inf)
    written_out = scores.softmax(-1) @ value
    assert written_out.dtype == torch.bfloat16
    assert torch.equal(plain, written_out.transpose(0, 1).float())


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_a_flash_kernels_rounding_passes_and_a_wrong_gradient_does_not(benchmark: Any, wrong: float) -> None:
    for case in benchmark.cases():
        if case.name.startswith(("window 1", "512")):  # a query sees few keys: nothing is added up
            continue
        found = benchmark.errors(Backend(name="flash", kernel=flash(wrong)), case)
        assert found["ok"] == (wrong == 0), (case.name, found)
