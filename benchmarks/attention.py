"""Check every available attention kernel against fp32, and measure its time by window.

    python benchmarks/attention.py parity [--output FILE]    error of each kernel and of plain half precision
    python benchmarks/attention.py speed [ROW ...]           milliseconds forward and backward, by window and documents
    python benchmarks/attention.py speed ... --windows N ... for these windows alone
    python benchmarks/attention.py ... --backends NAME ...   for these kernels, in this order
    python benchmarks/attention.py ... --seconds N           with a time limit for each kernel and row length

Each kernel, and each row length of its times, runs in a separate process, so that one that breaks the CUDA context does
not affect the others; after a case that ends the process, another one continues with the next case. FlashAttention 4,
which compiles for each kind of call unless benchmarks/flash_attn_4.sh did so beforehand, has twice the time. At the end
of parity a table says which kernel is right or wrong in which case, cannot compute it, or died.

Parity uses flash-attention's criterion: the error against fp32 is at most twice that of plain bf16 products with a
softmax between them. Backward runs twice, and must give equal results in deterministic mode.

Speed: `ideal` is the kernel's own time for one causal segment of the whole row, times the pairs of this layout over the
pairs of that one, that is, the time at constant cost per pair. Goal: at most 1.25 times that for windows from 256 on. A
kernel that takes ten times as long for a window as for the whole row is not measured with shorter ones. QKV are created
once, on the GPU; CUDA events measure. Without CUDA the reference replaces the kernels, on small sizes: a dry run.
"""

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from clock import CUDA, DEVICE, timed
from record import Records, parser_of, run_apart
from results import read, verdicts
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.arrays import Int32
from megatron_ext.attention.backends import BACKENDS, select
from megatron_ext.attention.interface import Attend, AttentionCall
from megatron_ext.context_parallel import plan
from megatron_ext.context_parallel.exchange import QKV, Scheme
from megatron_ext.context_parallel.group import CPGroup
from megatron_ext.device import moved
from megatron_ext.errors import UserError
from megatron_ext.layout import build_layout

GOAL = 1.25
FROM_WINDOW = 256
HOPELESS = 10.0  # a window's time over the whole row's, after which no shorter one is measured
FLOOR = 1e-4  # an error that is never too large; plain half precision has none if each query sees one key
LOST = 4  # exit status of a process that an error has left without a usable GPU
SLOWER = {"flash_attn_4": 2}  # multiples of the time limit
REPEATING = ("torch_varlen", "flash_attn_4", "flash_attn", "auto", "reference")  # if deterministic
ENOUGH_SECONDS = 1.0  # total time of repeated calls of one case
# fallbacks first, so that something has been checked if time runs out; for times first the two that `auto` may choose.
# `auto` itself runs these kernels again.
ORDER = {
    "parity": ["torch_varlen", "flash_attn_4", "te_thd", "flash_attn"],
    "speed": ["flash_attn_4", "torch_varlen", "te_thd", "flash_attn"],
}


@dataclass(frozen=True)
class Case:
    """One packed call: borders, heads, left window.

    `strided`: the query is a slice of more heads, as in exchange; `offset`: all tensors are rows of longer ones, of
    which they leave out so many.
    """

    name: str
    cu_seqlens_q: Int32
    cu_seqlens_kv: Int32
    heads: int = 8
    groups: int = 2
    head_size: int = 64
    left_window: int | None = None
    strided: bool = False
    offset: int = 0
    value_size: int | None = None  # None: the size of the keys
    sinks: bool = False
    deterministic: bool = False
    last_alone: bool = False  # whether only the last segment is compared, because the reference has no memory for all

    @property
    def pairs(self) -> int:
        """Return the number of (query, visible key) pairs."""
        q = np.diff(self.cu_seqlens_q).astype(np.int64)
        kv = np.diff(self.cu_seqlens_kv).astype(np.int64)
        return int((q * (kv - q) + q * (q + 1) // 2).sum())


def cases() -> Iterator[Case]:
    """Yield what runs may ask of a kernel, on both sides of every limit.

    That is: segments of all lengths and none, bottom-right calls, sliding windows, sizes and groups of heads, sinks,
    deterministic mode, many segments, and tensors of more than 2^31 numbers. First come those that have been wrong.
    """
    row, more, many, long = (8192, 300, 131072, (129, 4096, 32, 128)) if CUDA else (128, 30, 256, (5, 64, 4, 16))
    draw = np.random.default_rng(0)
    lengths = np.unique(np.geomspace(1, row // 4, 24).astype(np.int64))
    every_length = borders(draw.permutation(lengths))
    longer = every_length + borders(draw.integers(0, more, len(lengths)))
    whole = build_layout(row, (), row).cu_seqlens
    yield Case("rows of a longer tensor", every_length, longer, offset=3)
    yield from pieces(row)
    yield Case("sliding window, head 256", every_length, longer, head_size=256, left_window=row // 8)
    for size in (80, 96):
        yield Case(f"sinks, head {size}", every_length, longer, 8, 1, size, sinks=True)
    for size in (64, 128):
        yield Case(f"every length, head {size}", every_length, every_length, head_size=size)
        yield Case(f"one segment, head {size}", whole, whole, head_size=size)
        yield Case(f"strided query, head {size}", every_length, longer, head_size=size, strided=True)
    for size in (64, 80, 96, 128, 256):
        yield Case(f"bottom right, head {size}", every_length, longer, head_size=size)
        yield Case(f"no grouping, head {size}", every_length, longer, groups=8, head_size=size)
    yield Case("no grouping, head 192, value 128", every_length, longer, groups=8, head_size=192, value_size=128)
    yield Case("one key head", every_length, every_length, groups=1)
    for size, window in ((64, None), (128, None), (64, 17)):
        yield Case(f"sinks, head {size}, window {window}", every_length, longer, 8, 1, size, window, sinks=True)
    for size, groups in ((64, 8), (128, 2), (256, 2)):
        name = f"deterministic, head {size}, {groups} key heads"
        yield Case(name, every_length, longer, 8, groups, size, deterministic=True)
    for window in (0, 1, 17, row // 20, 2 * row):
        yield Case(f"sliding window of {window}", every_length, every_length, left_window=window)
    yield Case("sliding window, bottom right", every_length, longer, left_window=17)
    yield Case("sliding window, head 128", every_length, longer, head_size=128, left_window=row // 8)
    ones = np.arange(len(lengths) + 1, dtype=np.int32)
    yield Case("one query a segment", ones, ones + borders(lengths))
    partial_lengths = np.where(
        np.arange(len(lengths)) % 3, lengths, 0
    )  # the first of three has no queries, with keys or without
    keys = partial_lengths + np.where(np.arange(len(lengths)) % 2, 0, 40)
    yield Case("empty segments", borders(partial_lengths), borders(keys))
    for window in (1, 8, 32, 128):
        small = build_layout(row, (), window).cu_seqlens
        yield Case(f"window {window}", small, small)
    short = borders(draw.integers(1, 4, many))
    yield Case(f"{many} segments", short, short)
    count, length, heads, size = long
    beyond = borders(np.full(count, length))
    yield Case("beyond 2^31 numbers", beyond, beyond, heads, heads // 4, size, last_alone=True)


def pieces(row: int) -> Iterator[Case]:
    """Yield the calls of one of four context-parallel ranks: pieces that need no other rank's keys, and those that do.

    Its first piece continues a document, so the local ones begin after it.
    """
    layout = build_layout(row, (row // 3, row // 3 + 7, row // 2, row - row // 5), row)
    call = AttentionCall.of_plan(plan(layout, 4, policy="contiguous"), CPGroup(1, 4, None), Scheme.EXCHANGE)
    assert call.local is not None
    assert call.remote is not None
    yield Case("local pieces of a rank", call.local.cu_seqlens_q, call.local.cu_seqlens_kv, offset=row // 12)
    yield Case("remote pieces of a rank", call.remote.cu_seqlens_q, call.remote.cu_seqlens_kv)


def borders(lengths: np.ndarray) -> Int32:
    """Return the borders of segments of these lengths."""
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


def inputs(case: Case) -> list[Tensor]:
    """Draw queries, keys, values, the outputs' gradient and perhaps sinks on the device, in bf16."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    q = int(case.cu_seqlens_q[-1])
    kv = int(case.cu_seqlens_kv[-1])
    key = case.head_size
    value = case.value_size or case.head_size
    shapes = [(q, case.heads, key), (kv, case.groups, key), (kv, case.groups, value), (q, case.heads, value)]
    options = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    return [torch.randn(shape, **options) for shape in [*shapes, *[(case.heads,)] * case.sinks]]


def run(attend: Attend, case: Case, dtype: torch.dtype, tensors: list[Tensor]) -> list[Tensor]:
    """Compute the output and the gradients of queries, keys, values and sinks."""
    query, key, value, grad, *sinks = (x.detach().to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value, *sinks)]
    if case.strided:
        query = torch.cat([query] * 2, dim=1).chunk(2, dim=1)[1]
    if case.offset:
        query, key, value = (torch.cat((x.new_ones(case.offset, *x.shape[1:]), x))[case.offset :] for x in leaves[:3])
    call = moved(AttentionCall.of(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window), DEVICE)
    out = attend(QKV(query, key, value, *sinks), call, case.head_size**-0.5)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def errors(name: str, case: Case) -> dict[str, object]:
    """Return the largest errors of the output and the gradients, also of plain bf16, and which are wrong."""
    sizes = case.head_size, case.value_size or case.head_size
    if case.deterministic and name not in REPEATING:
        return {"skipped": "has no deterministic mode"}
    try:
        attend, reference = (
            select(backend, DEVICE, torch.bfloat16, *sizes, sinks=case.sinks) for backend in (name, "reference")
        )
        tensors = inputs(case)
        torch.use_deterministic_algorithms(case.deterministic)
        with (
            contextlib.nullcontext() if CUDA else sdpa_kernel(SDPBackend.MATH)
        ):  # torch's CPU kernel keeps less than 2x
            measured, again = (run(attend, case, torch.bfloat16, tensors) for _ in range(2))
    except UserError as error:
        return {"skipped": str(error)}
    finally:
        torch.use_deterministic_algorithms(False)
    repeats = all(torch.equal(x, y) for x, y in zip(measured, again, strict=True))
    if case.last_alone:
        q, kv = (cu[-2:] - cu[-2] for cu in (case.cu_seqlens_q, case.cu_seqlens_kv))
        case = replace(case, cu_seqlens_q=q, cu_seqlens_kv=kv)
        rows = [int(cu[-1]) for cu in (q, kv, kv, q)]
        tensors = [x[-count:] for x, count in zip(tensors, rows, strict=True)]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # by default it computes in fp32 and rounds the result
    with sdpa_kernel(SDPBackend.MATH):
        exact, plain = (run(reference, case, dtype, tensors) for dtype in (torch.float32, torch.bfloat16))
    facts: dict[str, object] = {"repeats": repeats}
    over: dict[str, float] = {}
    for tensor, x, p, e in zip(("out", "dq", "dk", "dv", "ds"), measured, plain, exact, strict=False):
        error, of_plain = ((y[-len(e) :].float() - e).abs().max().item() for y in (x, p))
        facts |= {f"{tensor}_error": error, f"{tensor}_plain": of_plain}
        over[tensor] = error / (of_plain + FLOOR / 2)
    wrong = [tensor for tensor, ratio in over.items() if not ratio <= 2]  # NaN is wrong
    if case.deterministic and not repeats:
        wrong.append("backward does not repeat")
    return facts | {"over_plain": max(over.values()), "wrong": wrong, "ok": not wrong}


def layouts(row: int, windows: Sequence[int]) -> Iterator[tuple[str, int, Int32]]:
    """Yield the windows or, if there are none, those from the whole row down to 8 and rows of documents.

    That is, a name, the window and the borders.
    """
    factor = 4 if row > 32768 else 2
    for window in windows or [row // factor**step for step in range(int(math.log(row / 8, factor)) + 1)]:
        yield f"window {window}", window, build_layout(row, (), window).cu_seqlens
    if windows:
        return
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(min(849, row // 8)), 0.974, row // 200 + 50), 16, row).astype(np.int64)
    ends = np.cumsum(lengths)
    yield "documents", row, build_layout(row, ends[ends < row], row).cu_seqlens
    half = row // 2 + ends[ends < row // 2]
    yield "one of half the row, then documents", row, build_layout(row, np.append(row // 2, half), row).cu_seqlens


def speed(name: str, row: int, windows: Sequence[int], records: Records) -> None:
    """Record the times of each layout; 32 heads and 8 key heads of size 128, as in Llama-3-8B."""
    heads, groups, size = (32, 8, 128) if CUDA else (4, 2, 32)
    attend = select(name, DEVICE, torch.bfloat16, size)
    times: list[float] = []  # milliseconds, of the whole row first
    per_pair: list[float] = []

    def figures(case: Case, window: int) -> dict[str, object]:
        forward, backward = milliseconds(attend, case)
        times.append(forward + backward)
        per_pair.append(times[-1] / case.pairs)
        over_ideal = per_pair[-1] / per_pair[0]
        flops = 4 * case.pairs * heads * size
        facts_of_case: dict[str, object] = {"forward_ms": forward, "backward_ms": backward, "over_ideal": over_ideal}
        facts_of_case |= {"forward_tflops": flops / forward / 1e9, "backward_tflops": 2.5 * flops / backward / 1e9}
        if case.name.startswith("window") and window >= FROM_WINDOW:
            facts_of_case["met"] = over_ideal <= GOAL
        return facts_of_case

    for layout, window, cu_seqlens in layouts(row, windows):
        case = Case(layout, cu_seqlens, cu_seqlens, heads, groups, size)
        facts = {"row": row, "layout": layout, "segments": len(cu_seqlens) - 1}
        if times and times[-1] > HOPELESS * times[0]:
            records.add(backend=name, **facts, skipped=f"took {HOPELESS:.0f} times as long as the whole row before it")
            continue
        attempt(records, partial(figures, case, window), backend=name, **facts)


def attempt(records: Records, work: Callable[[], dict[str, object]], **facts: object) -> None:
    """Record a measurement or its error; end the process with `LOST` if the error has made the GPU unusable."""
    if not records.measure(work, **facts) and CUDA:
        try:
            torch.cuda.synchronize()  # raises the same error again if the GPU is lost to this process
        except Exception:
            sys.exit(LOST)


def milliseconds(attend: Attend, case: Case) -> tuple[float, float]:
    """Time forward and backward separately: the median of as many calls as fit into `ENOUGH_SECONDS`, at least one."""
    *leaves, grad = inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    call = moved(AttentionCall.of(case.cu_seqlens_q, case.cu_seqlens_kv, case.left_window), DEVICE)
    scale = case.head_size**-0.5
    forwards: list[float] = []
    backwards: list[float] = []
    enough = 0.0
    while len(forwards) < 2 or (time.perf_counter() < enough and len(forwards) < 50):
        if len(forwards) == 1:  # the first one compiles and allocates
            enough = time.perf_counter() + ENOUGH_SECONDS
        with timed(forwards):
            out = attend(QKV(*leaves), call, scale)
        with timed(backwards):
            torch.autograd.grad(out, leaves, grad)
    return statistics.median(forwards[1:]) * 1e3, statistics.median(backwards[1:]) * 1e3


def main() -> int:
    """Run the benchmark; return 1 if a kernel is wrong or fails."""
    parser = parser_of(__doc__)
    parser.add_argument("step", choices=list(ORDER))
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="speed: tokens of a row")
    parser.add_argument("--windows", nargs="+", type=int, default=[], metavar="N", help="speed: the longest first")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS, "auto"], metavar="NAME")
    parser.add_argument("--seconds", type=float, help="time limit of each kernel")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one kernel, in this process
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)  # number of the first case
    options = parser.parse_args()
    step = options.step
    names = options.backends or [*ORDER[options.step], *([] if CUDA else ["reference"])]
    scratch = tempfile.TemporaryDirectory()
    output = options.output or Path(scratch.name) / "results.jsonl"
    records = Records("correct" if step == "parity" else "attention", output)
    if options.here:
        if step == "speed":
            speed(names[0], options.rows[0], options.windows, records)
        for case in list(cases())[options.first :] if step == "parity" else ():
            attempt(records, partial(errors, names[0], case), backend=names[0], case=case.name)
        return int(records.failed > 0)

    offset = output.stat().st_size if output.exists() else 0
    failed = False
    rows = [None] if step == "parity" else options.rows or ([8192, 32768, 131072, 524288] if CUDA else [512])
    for row, name in itertools.product(rows, names):
        reason = None if name == "auto" else BACKENDS[name].objection(DEVICE, torch.bfloat16, 128)
        if reason is not None:
            records.add(backend=name, step=step, skipped=reason)
            continue
        windows = ["--windows", *map(str, options.windows)] if options.windows else []
        failed |= apart(records, step, name, row, options.seconds, *windows)
    if step == "parity":
        print(*verdicts(read(output, offset)), sep="\n")
    return int(failed or records.failed > 0)


def apart(records: Records, step: str, name: str, row: int | None, seconds: float | None, *flags: str) -> bool:
    """Run one kernel in a process, and in further ones for the cases after one that ends it; return if any failed."""
    names = [case.name for case in cases()] if step == "parity" else []
    limit = None if seconds is None else SLOWER.get(name, 1) * seconds
    began = time.monotonic()
    first = 0
    failed = False
    while True:
        remaining = None if limit is None else max(limit - (time.monotonic() - began), 1)
        command = [step, *([str(row)] if row else []), "--backends", name, "--here", "--first", str(first), *flags]
        status = run_apart(records, *command, timeout_s=remaining, backend=name, **({"row": row} if row else {}))
        failed |= status != 0
        if status in (0, 1, None) or records.last.get("case") not in names[:-1]:
            return failed
        first = names.index(records.last["case"]) + 1


if __name__ == "__main__":
    sys.exit(main())
