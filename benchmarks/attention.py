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

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from clock import CUDA, DEVICE, timed
from record import Records, parser_of, run_apart
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.arrays import Int32
from megatron_ext.attention.backends import BACKENDS, select
from megatron_ext.attention.exchange import Inputs
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.device import moved
from megatron_ext.layout import build_layout

GOAL, FROM_WINDOW = 1.25, 256
ENOUGH_SECONDS = 1.0  # total time of repeated calls of one case
# fallbacks first, so that something has been checked if time runs out; for times first the two that `auto` may choose
ORDER = {
    "parity": ["triton_packed", "torch_varlen", "flash_attn_4", "te_thd", "flash_attn", "auto"],
    "speed": ["flash_attn_4", "torch_varlen", "triton_packed", "te_thd", "flash_attn", "auto"],
}


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


def inputs(case: Case) -> list[Tensor]:
    """Draw queries, keys, values and the outputs' gradient on the device, in bf16."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    q, kv = int(case.cu_seqlens_q[-1]), int(case.cu_seqlens_kv[-1])
    shapes = [(q, case.heads), (kv, case.groups), (kv, case.groups), (q, case.heads)]
    options = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    return [torch.randn(rows, heads, case.head_size, **options) for rows, heads in shapes]


def run(attend: Attend, case: Case, dtype: torch.dtype, given: list[Tensor]) -> list[Tensor]:
    """Compute the output and the gradients of queries, keys and values, in float32."""
    *leaves, grad = (x.to(dtype) for x in given)
    leaves = [x.requires_grad_() for x in leaves]
    query = torch.cat([leaves[0]] * 2, dim=1).chunk(2, dim=1)[1] if case.strided else leaves[0]
    call = moved(AttentionCall(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window), DEVICE)
    out = attend(Inputs(query, *leaves[1:]), call, case.head_size**-0.5)
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def errors(name: str, case: Case) -> dict[str, object]:
    """Return the largest errors of the output and the gradients, the tolerance, and whether all are within it."""
    attend, reference = (select(one, DEVICE, torch.bfloat16, case.head_size) for one in (name, "reference"))
    given = inputs(case)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # by default it computes in fp32 and rounds the result
    with sdpa_kernel(SDPBackend.MATH):
        exact, plain = (run(reference, case, dtype, given) for dtype in (torch.float32, torch.bfloat16))
    with contextlib.nullcontext() if CUDA else sdpa_kernel(SDPBackend.MATH):  # torch's CPU kernel keeps less than 2x
        measured, again = (run(attend, case, torch.bfloat16, given) for _ in range(2))
    facts: dict[str, object] = {"repeats": all(torch.equal(x, y) for x, y in zip(measured, again, strict=True))}
    within = []
    for tensor, x, p, e in zip(("out", "dq", "dk", "dv"), measured, plain, exact, strict=True):
        error, allowed = (x - e).abs().max().item(), 2 * (p - e).abs().max().item() + 1e-5
        facts |= {f"{tensor}_error": error, f"{tensor}_allowed": allowed}
        within.append(error <= allowed)
    return facts | {"ok": all(within)}


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


def speed(name: str, row: int, records: Records) -> None:
    """Record the times of each layout; 32 heads and 8 key heads of size 128, as in Llama-3-8B."""
    heads, groups, size = (32, 8, 128) if CUDA else (4, 2, 32)
    attend = select(name, DEVICE, torch.bfloat16, size)
    per_pair: list[float] = []  # milliseconds, of the whole row first

    def figures(case: Case, window: int) -> dict[str, object]:
        forward, backward = milliseconds(attend, case)
        per_pair.append((forward + backward) / case.pairs)
        over_ideal, flops = per_pair[-1] / per_pair[0], 4 * case.pairs * heads * size
        found: dict[str, object] = {"forward_ms": forward, "backward_ms": backward, "over_ideal": over_ideal}
        found |= {"forward_tflops": flops / forward / 1e9, "backward_tflops": 2.5 * flops / backward / 1e9}
        if case.name.startswith("window") and window >= FROM_WINDOW:
            found["met"] = over_ideal <= GOAL
        return found

    for layout, window, cu_seqlens in layouts(row):
        case = Case(layout, cu_seqlens, cu_seqlens, heads, groups, size)
        facts = {"row": row, "layout": layout, "segments": len(cu_seqlens) - 1}
        attempt(records, partial(figures, case, window), backend=name, **facts)


def attempt(records: Records, work: Callable[[], dict[str, object]], **facts: object) -> None:
    """Record a measurement or its error; stop if the error has made the GPU unusable."""
    if not records.measure(work, **facts) and CUDA:
        torch.cuda.synchronize()  # raises the same error again if the GPU is lost to this process


def milliseconds(attend: Attend, case: Case) -> tuple[float, float]:
    """Time forward and backward separately: the median of as many calls as fit into `ENOUGH_SECONDS`, at least one."""
    *leaves, grad = inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    call = moved(AttentionCall(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window), DEVICE)
    scale = case.head_size**-0.5
    forwards: list[float] = []
    backwards: list[float] = []
    enough = 0.0
    while len(forwards) < 2 or (time.perf_counter() < enough and len(forwards) < 50):
        if len(forwards) == 1:  # the first one compiles and allocates
            enough = time.perf_counter() + ENOUGH_SECONDS
        with timed(forwards):
            out = attend(Inputs(*leaves), call, scale)
        with timed(backwards):
            torch.autograd.grad(out, leaves, grad)
    return statistics.median(forwards[1:]) * 1e3, statistics.median(backwards[1:]) * 1e3


def main() -> int:
    """Run the benchmark; return 1 if a kernel is wrong or fails."""
    parser = parser_of(__doc__)
    parser.add_argument("step", choices=list(ORDER))
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="speed: tokens of a row")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS, "auto"], metavar="NAME")
    parser.add_argument("--seconds", type=float, help="time limit of each kernel")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one kernel, in this process
    options = parser.parse_args()
    step, names = options.step, options.backends or [*ORDER[options.step], *([] if CUDA else ["reference"])]
    records = Records("correct" if step == "parity" else "attention", options.output)
    if options.here:
        if step == "speed":
            speed(names[0], options.rows[0], records)
        for case in cases() if step == "parity" else ():
            attempt(records, partial(errors, names[0], case), backend=names[0], case=case.name)
        return int(records.failed > 0)

    failed = False
    rows = [None] if step == "parity" else options.rows or ([8192, 32768, 131072, 524288] if CUDA else [512])
    for row, name in itertools.product(rows, names):
        reason = None if name == "auto" else BACKENDS[name].objection(DEVICE, torch.bfloat16, 128)
        if reason is not None:
            records.add(backend=name, step=step, skipped=reason)
            continue
        command = [step, *([str(row)] if row else []), "--backends", name, "--here"]
        try:
            failed |= run_apart(*command, output=options.output, timeout_s=options.seconds) != 0
        except subprocess.TimeoutExpired:
            records.add(backend=name, step=step, row=row, ok=False, error=f"takes more than {options.seconds:g} s")
    return int(failed or records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
