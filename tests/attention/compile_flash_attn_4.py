"""Compile FlashAttention 4 on a CPU: its adapter called with fake CUDA tensors, forward and backward.

    python tests/attention/compile_flash_attn_4.py 90|100 [NAME ...]    for an H100 or a B200, the benchmark's cases

Prints a line for each call, with the backend that `auto` would choose. test_flash_attn_4.py runs it in a process.
With FOR_PYTHON=3.12, kernels in FLASH_ATTENTION_CUTE_DSL_CACHE_DIR are for that version: they do not differ, but their
folder is named after Python, FlashAttention 4's sources and its compiler (benchmarks/flash_attn_4.sh compile).
"""

# ruff: noqa: E402  (the mock is installed before torch and the benchmark are imported)
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ARCH = sys.argv[1]
os.environ |= {"FLASH_ATTENTION_ARCH": f"sm_{ARCH}", "CUTE_DSL_ARCH": f"sm_{ARCH}a"}

from megatron_ext.rehearsal.process import load_mock

load_mock()

import cutlass
import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext.attention.backends import select
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.config import ModelConfig
from megatron_ext.config.options import PRESETS
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.rehearsal import cuda_mock

cuda_mock.install()
torch.cuda.get_device_capability = lambda *_: divmod(int(ARCH), 10)

# a scheduler of the kernels for Blackwell asks the driver for the number of SMs, a B200's
cutlass.utils.HardwareInfo = lambda: SimpleNamespace(get_device_multiprocessor_count=lambda: 148)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import attention as benchmark

CUDA = torch.device("cuda")


def compile_call(attend: Attend, case: benchmark.Case) -> None:
    """Run a call forward and backward, and check the shapes of its results."""

    def rows(cu_seqlens: np.ndarray, heads: int, size: int = case.head_size) -> Tensor:
        shape = (int(cu_seqlens[-1]), heads, size)
        return torch.empty(shape, dtype=torch.bfloat16, device=CUDA, requires_grad=True)

    query = rows(case.cu_seqlens_q, case.heads * (2 if case.strided else 1))
    value_size = case.value_size or case.head_size
    key, value = (rows(case.cu_seqlens_kv, case.groups, size) for size in (case.head_size, value_size))
    borders = tuple(torch.empty(len(case.cu_seqlens_q), dtype=torch.int32, device=CUDA) for _ in range(2))
    call = replace(AttentionCall.of(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window), borders=borders)
    part = query.chunk(2, dim=1)[1] if case.strided else query
    sink = torch.empty(case.heads, dtype=torch.bfloat16, device=CUDA, requires_grad=True) if case.sinks else None
    out = attend(QKV(part, key, value, sink), call, case.head_size**-0.5)
    assert (out.shape, out.dtype) == ((*part.shape[:2], value_size), torch.bfloat16)
    leaves = [x for x in (query, key, value, sink) if x is not None]
    gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


def trained() -> Iterator[benchmark.Case]:
    """Yield a call for the heads of each preset, which other parts of benchmarks/gpu.sh train."""
    for name, preset in PRESETS.items():
        model = ModelConfig(**preset)
        borders = benchmark.borders(np.array([9, 32]))
        heads = model.num_attention_heads, model.num_query_groups, model.head_size
        yield benchmark.Case(f"preset {name}", borders, borders, *heads)


def rename_cache(version: str) -> None:
    """Rename the folder of this Python's kernels to another version's name."""
    from flash_attn.cute import cache_utils

    folder = cache_utils.get_cache_path() / cache_utils._compute_source_fingerprint()
    major, minor = version.split(".")
    cache_utils.sys = SimpleNamespace(version_info=SimpleNamespace(major=major, minor=minor))
    folder.rename(folder.with_name(cache_utils._compute_source_fingerprint.__wrapped__()))


def main() -> None:
    for case in [*benchmark.cases(), *trained()]:
        if sys.argv[2:] and case.name not in sys.argv[2:]:
            continue
        torch.use_deterministic_algorithms(case.deterministic)
        sizes = case.head_size, case.value_size or case.head_size
        auto = select("auto", CUDA, torch.bfloat16, *sizes, sinks=case.sinks)
        with FakeTensorMode():
            compile_call(auto, case)
        print("compiled:", case.name, *auto.logged, sep="\t", flush=True)
    if "FOR_PYTHON" in os.environ:
        rename_cache(os.environ["FOR_PYTHON"])


if __name__ == "__main__":
    main()
