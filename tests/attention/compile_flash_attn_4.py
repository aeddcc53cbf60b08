"""Compile FlashAttention 4 for an H100 on a CPU: its adapter called with fake CUDA tensors, forward and backward.

Prints a line for each call, with the backend that `auto` would choose. test_flash_attn_4.py runs it in a process.
"""

# ruff: noqa: E402  (the mock is installed before torch and the benchmark are imported)
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_ext.run.rehearsal.process import load_mock

load_mock()

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext.attention.backends import select
from megatron_ext.attention.exchange import Inputs
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.run.rehearsal import cuda_mock

cuda_mock.install()

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import attention as benchmark

CUDA = torch.device("cuda")


def cases() -> Iterator[tuple[benchmark.Case, bool]]:
    """Yield the benchmark's cases, further head sizes and groups, and whether to run deterministically."""
    for case in benchmark.cases():
        yield case, False
    segments = np.array([0, 300, 1000, 4096], dtype=np.int32)
    for size in (80, 96, 256):
        yield benchmark.Case(f"head {size}", segments, segments, head_size=size), False
    yield benchmark.Case("4 heads a key head, sliding", segments, segments, head_size=128, left_window=1000), False
    yield benchmark.Case("MLA", segments, segments, groups=8, head_size=192), False
    yield benchmark.Case("deterministic", segments, segments, head_size=128), True


def compile_call(attend: Attend, case: benchmark.Case, *, sinks: bool = False) -> None:
    """Run a call forward and backward, and check the shapes of its results."""

    def rows(cu_seqlens: np.ndarray, heads: int, size: int = case.head_size) -> Tensor:
        shape = (int(cu_seqlens[-1]), heads, size)
        return torch.empty(shape, dtype=torch.bfloat16, device=CUDA, requires_grad=True)

    query = rows(case.cu_seqlens_q, case.heads * (2 if case.strided else 1))
    value_size = 128 if case.name == "MLA" else case.head_size
    key, value = (rows(case.cu_seqlens_kv, case.groups, size) for size in (case.head_size, value_size))
    borders = tuple(torch.empty(len(case.cu_seqlens_q), dtype=torch.int32, device=CUDA) for _ in range(2))
    call = replace(AttentionCall(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window), borders=borders)
    part = query.chunk(2, dim=1)[1] if case.strided else query
    sink = torch.empty(case.heads, dtype=torch.bfloat16, device=CUDA, requires_grad=True) if sinks else None
    out = attend(Inputs(part, key, value, sink), call, case.head_size**-0.5)
    assert (out.shape, out.dtype) == ((*part.shape[:2], value_size), torch.bfloat16)
    leaves = [x for x in (query, key, value, sink) if x is not None]
    gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


def main() -> None:
    for case, deterministic in cases():
        torch.use_deterministic_algorithms(deterministic)
        named, auto = (select(name, CUDA, torch.bfloat16, case.head_size) for name in ("flash_attn_4", "auto"))
        with FakeTensorMode():
            compile_call(named, case)
            compile_call(auto, case)
            if case.name.startswith("4 heads"):
                compile_call(named, case, sinks=True)
        print("compiled:", case.name, *auto.logged, sep="\t", flush=True)


if __name__ == "__main__":
    main()
