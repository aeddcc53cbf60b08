"""Every attention backend that runs here: right against fp32, and how its time follows the window.

    python benchmarks/attention.py parity            error of each backend beside that of plain half precision
    python benchmarks/attention.py speed             milliseconds against the window, forward and backward

On a machine without CUDA the reference backend stands for the kernels, on small sizes: a dry run. The rule of
parity is flash-attention's: the error against fp32 is at most twice that of the reference in half precision.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_ext.attention.backends import BACKENDS, Backend
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.layout import build_layout

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@dataclass(frozen=True)
class Case:
    """One packed call: its borders, heads and reach."""

    name: str
    cu_seqlens_q: np.ndarray
    cu_seqlens_kv: np.ndarray
    heads: int = 8
    groups: int = 2
    head_size: int = 64
    reach: int | None = None


def cases() -> Iterator[Case]:
    """Yield segments of all lengths, bottom-right calls, sliding windows, GQA, both head sizes, very many segments."""
    row, many = (16384, 131072) if CUDA else (256, 512)
    draw = np.random.default_rng(0)
    lengths = np.unique(np.geomspace(1, row // 4, 24).astype(np.int64))
    every_length = np.append(0, np.cumsum(draw.permutation(lengths))).astype(np.int32)
    extra = draw.integers(0, 300, len(lengths))
    longer = every_length + np.append(0, np.cumsum(extra)).astype(np.int32)
    whole = build_layout(row, (), row).cu_seqlens
    for size in (64, 128):
        yield Case(f"every length, head {size}", every_length, every_length, head_size=size)
        yield Case(f"bottom right, head {size}", every_length, longer, head_size=size)
        yield Case(f"one segment, head {size}", whole, whole, head_size=size)
    yield Case("no grouping", every_length, every_length, groups=8)
    yield Case("one key head", every_length, every_length, groups=1)
    yield Case("sliding window", every_length, every_length, reach=row // 20)
    yield Case("sliding window, bottom right", every_length, longer, reach=17)
    short = np.append(0, np.cumsum(draw.integers(1, 4, many))).astype(np.int32)
    yield Case(f"{many} segments", short, short)


def inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys, values and the outputs' gradient, the same numbers in any precision."""
    generator = torch.Generator().manual_seed(1)
    q, kv = int(case.cu_seqlens_q[-1]), int(case.cu_seqlens_kv[-1])
    shapes = [(q, case.heads), (kv, case.groups), (kv, case.groups), (q, case.heads)]
    drawn = [torch.randn(rows, heads, case.head_size, generator=generator) for rows, heads in shapes]
    return [x.to(torch.bfloat16).to(DEVICE, dtype) for x in drawn]


def run(backend: Backend, case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Compute the output and the gradients of queries, keys and values, in float32."""
    *leaves, grad = inputs(case, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    call = AttentionCall(case.cu_seqlens_q, case.cu_seqlens_kv, case.reach).to(DEVICE)
    out = backend.attend(*leaves, call, case.head_size**-0.5)
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def kernels() -> list[Backend]:
    """List the backends to look at: all CUDA ones that are installed, or the reference alone."""
    return [b for b in BACKENDS if b.missing() is None and (b.name == "reference") != CUDA]


def parity() -> Iterator[dict[str, object]]:
    """Yield a record per backend and case."""
    reference = next(backend for backend in BACKENDS if backend.name == "reference")
    for case in cases():
        exact = run(reference, case, torch.float32)
        plain = run(reference, case, torch.bfloat16)
        for backend in kernels():
            record: dict[str, object] = {"step": "parity", "backend": backend.name, "case": case.name}
            try:
                measured = run(backend, case, torch.bfloat16)
            except Exception as error:
                yield record | {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
                continue
            ok = True
            for name, x, p, e in zip(("out", "dq", "dk", "dv"), measured, plain, exact, strict=True):
                error, allowed = (x - e).abs().max().item(), 2 * (p - e).abs().max().item() + 1e-5
                record |= {f"{name}_error": error, f"{name}_allowed": allowed}
                ok = ok and error <= allowed
            yield record | {"ok": ok}


def speed() -> Iterator[dict[str, object]]:
    """Yield a record per backend and window: a row of 128K tokens, 32 heads, 8 groups of 128."""
    row, heads, groups, size = (131072, 32, 8, 128) if CUDA else (512, 4, 2, 32)
    full: dict[str, float] = {}
    windows = [row >> k for k in range(0, 13, 2) if row >> k >= 8]
    for window in windows:
        borders = build_layout(row, (), window).cu_seqlens
        case = Case(f"window {window}", borders, borders, heads, groups, size)
        for backend in kernels():
            seconds = _seconds(backend, case)
            full.setdefault(backend.name, seconds)
            yield {
                "step": "speed",
                "backend": backend.name,
                "window": window,
                "segments": len(borders) - 1,
                "milliseconds": round(seconds * 1e3, 3),
                "share_of_full": round(seconds / full[backend.name], 4),
            }


def _seconds(backend: Backend, case: Case, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        _wait()
        began = time.perf_counter()
        run(backend, case, torch.bfloat16)
        _wait()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def main() -> int:
    """Print one JSON object per line, and append them to --output; 1 where a backend is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["parity", "speed"])
    parser.add_argument("--output", type=Path, help="file of JSON lines to append to")
    options = parser.parse_args()
    machine = {
        "device": torch.cuda.get_device_name() if CUDA else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }
    wrong = False
    for record in parity() if options.step == "parity" else speed():
        line = json.dumps(record | machine)
        print(line, flush=True)
        wrong = wrong or record.get("ok") is False
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
