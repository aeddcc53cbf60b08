"""Check every available attention kernel against fp32, and measure its time by window.

    python benchmarks/attention.py parity [--output FILE]    error of each kernel next to that of plain half precision
    python benchmarks/attention.py speed [ROW ...]           milliseconds forward and backward, by window and documents
    python benchmarks/attention.py ... --backends NAME ...   for these kernels, in this order
    python benchmarks/attention.py ... --seconds N           with a time limit for each kernel and row length

Each kernel, and each row length of its times, runs in a separate process, so that one that breaks the CUDA context does
not affect the others. A kernel that cannot run here is recorded with the reason, one that takes too long as an error.

Parity uses flash-attention's criterion: the error against fp32 is at most twice that of plain bf16 products with a
softmax between them. Backward runs twice: a kernel with different results is reported under "repeats".

Speed: `ideal` is the kernel's own time for one causal segment of the whole row, times the pairs of this layout over the
pairs of that one, that is, the time at constant cost per pair. Goal: at most 1.25 times that for windows from 256 on.
Inputs are created once, on the GPU; CUDA events measure. Without CUDA the reference replaces the kernels, on small
sizes: a dry run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from record import CUDA, DEVICE, Records, parser_of, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.arrays import Int32
from megatron_ext.attention.backends import BACKENDS, Backend, PerCall, select
from megatron_ext.attention.inputs import Inputs
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.layout import build_layout

GOAL, FROM_WINDOW = 1.25, 256
ENOUGH_SECONDS = 1.0  # total time of repeated calls of one case


@dataclass(frozen=True)
class Case:
    """One packed call: borders, heads, left window; `strided`: the query is a slice of more heads, as in exchange."""

    name: str
    cu_seqlens_q: Int32
    cu_seqlens_kv: Int32
    heads: int = 8
    groups: int = 2
    head_size: int = 64
    left_window: int | None = None
    strided: bool = False

    @property
    def pairs(self) -> int:
        """Return the number of (query, visible key) pairs."""
        q, kv = np.diff(self.cu_seqlens_q).astype(np.int64), np.diff(self.cu_seqlens_kv).astype(np.int64)
        return int((q * (kv - q) + q * (q + 1) // 2).sum())


def cases() -> Iterator[Case]:
    """Yield segments of all lengths, bottom-right calls, sliding windows, GQA, both head sizes, many segments."""
    row, many = (8192, 131072) if CUDA else (256, 512)
    draw = np.random.default_rng(0)
    lengths = np.unique(np.geomspace(1, row // 4, 24).astype(np.int64))
    every_length = borders(draw.permutation(lengths))
    longer = every_length + borders(draw.integers(0, 300, len(lengths)))
    whole = build_layout(row, (), row).cu_seqlens
    for size in (64, 128):
        yield Case(f"every length, head {size}", every_length, every_length, head_size=size)
        yield Case(f"bottom right, head {size}", every_length, longer, head_size=size)
        yield Case(f"one segment, head {size}", whole, whole, head_size=size)
        yield Case(f"strided query, head {size}", every_length, longer, head_size=size, strided=True)
    yield Case("no grouping", every_length, every_length, groups=8)
    yield Case("one key head", every_length, every_length, groups=1)
    yield Case("sliding window", every_length, every_length, left_window=row // 20)
    yield Case("sliding window, bottom right", every_length, longer, left_window=17)
    for window in (1, 8, 32, 128):
        small = build_layout(row, (), window).cu_seqlens
        yield Case(f"window {window}", small, small)
    short = borders(draw.integers(1, 4, many))
    yield Case(f"{many} segments", short, short)


def borders(lengths: np.ndarray) -> Int32:
    """Return the borders of segments of these lengths."""
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


def inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys, values and the outputs' gradient on the device: the same bf16 numbers in any precision."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    q, kv = int(case.cu_seqlens_q[-1]), int(case.cu_seqlens_kv[-1])
    shapes = [(q, case.heads), (kv, case.groups), (kv, case.groups), (q, case.heads)]
    drawn = [
        torch.randn(rows, heads, case.head_size, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        for rows, heads in shapes
    ]
    return [x.to(dtype) for x in drawn]


def run(backend: Backend, case: Case, dtype: torch.dtype, given: list[Tensor]) -> list[Tensor]:
    """Compute the output and the gradients of queries, keys and values, in float32."""
    *leaves, grad = (x.to(dtype) for x in given)
    leaves = [x.requires_grad_() for x in leaves]
    query = torch.cat([leaves[0]] * 2, dim=1).chunk(2, dim=1)[1] if case.strided else leaves[0]
    call = AttentionCall(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window).to(DEVICE)
    out = backend.kernel(Inputs(query, *leaves[1:]), call, case.head_size**-0.5)
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, leaves, grad))]


# fallbacks first, so that something has been checked if time runs out; for times first the two that `auto` may choose
ORDER = {
    "parity": ["triton_packed", "torch_varlen", "flash_attn_4", "te_thd", "flash_attn", "auto"],
    "speed": ["flash_attn_4", "torch_varlen", "triton_packed", "te_thd", "flash_attn", "auto"],
}


def skipped(name: str, head_size: int) -> str | None:
    """Return why a backend cannot run here; None if it can."""
    if name == "auto":
        return None
    backend = BACKENDS[name]
    capability = torch.cuda.get_device_capability() if CUDA else None
    return backend.objection(DEVICE, torch.bfloat16, head_size, capability)


def named(name: str, head_size: int) -> Backend:
    """Return a backend that refuses calls which the kernel does not support, or the choice of `auto`."""
    if name == "auto":
        return Backend(name="auto", kernel=select("auto", DEVICE, torch.bfloat16, head_size))
    return Backend(name=name, kernel=PerCall((name,)))


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """Make torch's own attention use products with a softmax between them, in bf16 for bf16 inputs.

    By default torch computes them in fp32 and rounds the result.
    """
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def errors(name: str, case: Case) -> dict[str, object]:
    """Return the largest errors of the output and the gradients, the tolerance, and whether all are within it."""
    backend, reference = named(name, case.head_size), named("reference", case.head_size)
    given = inputs(case, torch.bfloat16)
    with plain_products():
        exact, plain = (run(reference, case, dtype, given) for dtype in (torch.float32, torch.bfloat16))
    with contextlib.nullcontext() if CUDA else plain_products():  # torch's CPU kernel keeps less than 2x
        measured, again = (run(backend, case, torch.bfloat16, given) for _ in range(2))
    facts: dict[str, object] = {}
    ok = True
    for tensor, x, p, e in zip(("out", "dq", "dk", "dv"), measured, plain, exact, strict=True):
        error, allowed = (x - e).abs().max().item(), 2 * (p - e).abs().max().item() + 1e-5
        facts |= {f"{tensor}_error": error, f"{tensor}_allowed": allowed}
        ok = ok and error <= allowed
    same = all(torch.equal(x, y) for x, y in zip(measured, again, strict=True))
    return facts | {"repeats": same, "ok": ok}


def layouts(row: int) -> Iterator[tuple[str, int, Int32]]:
    """Yield windows from the whole row down to 8, then rows of documents: name, window, borders."""
    window = row
    while window >= 8:
        yield f"window {window}", window, build_layout(row, (), window).cu_seqlens
        window //= 4 if row > 32768 else 2
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(min(849, row // 8)), 0.974, row // 200 + 50), 16, row).astype(np.int64)
    ends = np.cumsum(lengths)
    yield "documents", row, build_layout(row, ends[ends < row], row).cu_seqlens
    half = row // 2 + ends[ends < row // 2]
    yield "one of half the row, then documents", row, build_layout(row, np.append(row // 2, half), row).cu_seqlens


Task = tuple[dict[str, object], Callable[[], dict[str, object]]]  # what is measured, and the measurement


def parity(name: str) -> Iterator[Task]:
    """Yield the comparison of each case."""
    for case in cases():
        yield {"case": case.name}, partial(errors, name, case)


def speed(name: str, row: int) -> Iterator[Task]:
    """Yield the measurement of each layout; 32 heads and 8 key heads of size 128, as in Llama-3-8B."""
    heads, groups, size = (32, 8, 128) if CUDA else (4, 2, 32)
    backend = named(name, size)
    ideal: list[float] = []  # milliseconds per pair of the whole row

    def figures(case: Case, window: int) -> dict[str, object]:
        forward, backward = milliseconds(backend, case)
        ideal.append((forward + backward) / case.pairs)
        over, flops = ideal[-1] / ideal[0], 4 * case.pairs * heads * size
        found: dict[str, object] = {
            "forward_ms": round(forward, 3),
            "backward_ms": round(backward, 3),
            "forward_tflops": round(flops / forward / 1e9, 1),
            "backward_tflops": round(2.5 * flops / backward / 1e9, 1),
            "over_ideal": round(over, 2),
        }
        if case.name.startswith("window") and window >= FROM_WINDOW:
            found["met"] = over <= GOAL
        return found

    for layout, window, cu_seqlens in layouts(row):
        case = Case(layout, cu_seqlens, cu_seqlens, heads, groups, size)
        facts = {"row": row, "layout": layout, "segments": len(cu_seqlens) - 1}
        yield facts, partial(figures, case, window)


def record(tasks: Iterable[Task], name: str, records: Records) -> None:
    """Record a result or an error for each task; stop if an error has made the GPU unusable."""
    for facts, measure in tasks:
        try:
            records.add(backend=name, **facts, **measure())
        except Exception as error:  # any error of a kernel is its result
            records.error(error, backend=name, **facts)
            if CUDA:
                torch.cuda.synchronize()  # raises the same error again if the GPU is lost to this process


def milliseconds(backend: Backend, case: Case) -> tuple[float, float]:
    """Time forward and backward separately: the median of as many calls as fit into `ENOUGH_SECONDS`, at least one."""
    *leaves, grad = inputs(case, torch.bfloat16)
    leaves = [x.requires_grad_() for x in leaves]
    call = AttentionCall(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window).to(DEVICE)
    scale = case.head_size**-0.5
    forwards: list[float] = []
    backwards: list[float] = []
    enough = 0.0
    while len(forwards) < 2 or (time.perf_counter() < enough and len(forwards) < 50):
        if len(forwards) == 1:  # the first one compiles and allocates
            enough = time.perf_counter() + ENOUGH_SECONDS
        with timed(forwards):
            out = backend.kernel(Inputs(*leaves), call, scale)
        with timed(backwards):
            torch.autograd.grad(out, leaves, grad)
    return statistics.median(forwards[1:]) * 1e3, statistics.median(backwards[1:]) * 1e3


def main() -> int:
    """Run the benchmark; return 1 if a kernel is wrong or fails."""
    parser = parser_of(__doc__)
    parser.add_argument("step", choices=["parity", "speed"])
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="speed: tokens of a row")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS, "auto"], metavar="NAME")
    parser.add_argument("--seconds", type=float, help="time limit of each kernel")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one kernel, in this process
    options = parser.parse_args()
    names = options.backends or [*ORDER[options.step], *([] if CUDA else ["reference"])]
    records = Records("correct" if options.step == "parity" else "attention", options.output)
    rows = options.rows or ([8192, 32768, 131072, 524288] if CUDA else [512])
    turns = [[]] if options.step == "parity" else [[str(row)] for row in rows]
    output = ["--output", str(options.output)] if options.output else []
    failed = 0
    for turn, name in itertools.product(turns, names):
        if options.here:
            record(parity(name) if options.step == "parity" else speed(name, int(turn[0])), name, records)
            continue
        reason = skipped(name, 128)
        if reason is not None:
            records.add(backend=name, step=options.step, skipped=reason)
            continue
        command = [sys.executable, __file__, options.step, *turn, "--backends", name, "--here", *output]
        try:
            failed += subprocess.run(command, check=False, timeout=options.seconds).returncode != 0
        except subprocess.TimeoutExpired as error:
            records.error(error, backend=name, step=options.step, row=[*turn, None][0])
    return int(failed + records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
