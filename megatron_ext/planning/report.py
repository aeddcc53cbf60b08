"""Format the result of a search: a table of layouts, the bottleneck, and the gain from more memory or GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from megatron_ext.checkpoint.hf.names import count_active_parameters
from megatron_ext.config import Config
from megatron_ext.planning.flops import utilisation
from megatron_ext.planning.goodput import goodput
from megatron_ext.planning.memory import HEADROOM
from megatron_ext.planning.run_plan import gibibytes
from megatron_ext.planning.sampled_rows import SampledRows
from megatron_ext.planning.search import Found, last_window, search, windows
from megatron_ext.planning.step_time import Speeds, save_stall, step_time, work_of

MOST_REASONS = 8


def describe(
    found: Found,
    config: Config,
    gpus: int,
    gpu: str,
    vocab_size: int,
    speeds: Speeds,
    rows: SampledRows | None = None,
    *,
    offload: bool = True,
) -> Iterator[str]:
    """Yield the lines for `found`, the result of a search of `config` with the same rows and the same `offload`."""
    card = speeds.gpu(gpu)
    if not found.best:
        yield from describe_refusals(found, gpus, gpu, card.memory)
        return
    yield f"{found.tried:,} layouts on {gpus:,} {gpu} of {card.memory:.0f} GiB; the fastest that fit:"
    heads = f"{'s/step':>8} {'tokens/s/GPU':>12} {'MFU':>6} {'memory':>10} {'hours':>8} {'cost':>11}  bound by"
    yield f"{'':>3} {'layout':58} {heads}"
    tokens, last = config.data.global_batch_size * config.data.seq_length, last_window(config)
    for number, layout in enumerate(found.best, 1):
        assert layout.last is not None
        seconds = layout.last.total
        yield (
            f"{number:>3} {layout.name:58} {seconds:8.2f} {tokens / seconds / gpus:12,.0f} "
            f"{_mfu(layout.config, gpus, gpu, vocab_size, seconds, speeds, rows):6.1%} {gibibytes(layout.memory):>10} "
            f"{layout.hours:8,.1f} {f'${layout.hours * gpus * card.hour:,.0f}':>11}  {layout.last.bound}"
        )
    best = found.best[0]
    assert best.last is not None
    yield f"s/step, tokens/s and MFU at the last window ({last:,} tokens); hours and cost of the whole run"
    if rows is not None:
        whole = step_time(work_of(best.config, gpus, gpu, vocab_size, last), speeds).total
        yield f"If every row were a single document, a step of the first layout would take {whole:.2f} s."
    parts = sorted(asdict(best.last).items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / best.last.total:.0%}" for name, seconds in parts if seconds > 0)
    yield f"\nthe first layout, at the last window: {shares}"
    if len(set(windows(config))) > 1:
        widest = step_time(work_of(best.config, gpus, gpu, vocab_size, max(windows(config)), rows), speeds).total
        yield f"the window schedule saves {1 - best.seconds / widest:.1%} of the time of a constant window"
    if found.larger is not None:
        more = found.larger.memory / (1 - HEADROOM) - card.memory * 2**30
        gain = 1 - found.larger.seconds / best.seconds
        yield f"{gibibytes(int(more))} more memory per GPU would allow {found.larger.name}: {gain:.1%} less time"
    else:
        yield "more memory per GPU would not make it faster"
    twice = search(config, 2 * gpus, gpu, vocab_size, speeds, rows=rows, top=1, offload=offload)
    if twice.best:
        hours, price = twice.best[0].hours, twice.best[0].hours * 2 * gpus * card.hour
        yield f"{2 * gpus:,} GPUs: {hours:,.1f} hours with {twice.best[0].name}, ${price:,.0f}"
    else:
        yield f"{2 * gpus:,} GPUs: no layout divides the {config.data.global_batch_size:,} rows of a step among them"
    lost = goodput(gpus, save_stall(work_of(best.config, gpus, gpu, vocab_size, last), speeds))
    yield (
        f"failures: one every {lost.failure_seconds / 3600:,.1f} hours; saving every {lost.interval_seconds / 60:,.1f} "
        f"minutes (Young) leaves {lost.share:.1%} of the time for progress"
    )
    yield from _by_window(best.config, gpus, gpu, vocab_size, speeds, rows)


def describe_refusals(found: Found, gpus: int, gpu: str, memory: float) -> Iterator[str]:
    """Yield why no layout is possible: each reason with the number of layouts that it excludes."""
    yield f"None of {found.tried:,} layouts on {gpus:,} {gpu} is possible:"
    reasons = found.refused.most_common(MOST_REASONS)
    for reason, count in reasons:
        yield f"  {count:,} layouts: {reason}"
    if len(found.refused) > len(reasons):
        yield f"  and {len(found.refused) - len(reasons):,} more reasons"
    if found.larger is not None:
        yield (
            f"  {found.too_large:,} layouts: memory; the smallest needs {gibibytes(found.larger.memory)}, "
            f"available are {memory * (1 - HEADROOM):.1f} GiB ({memory:.0f} GiB less {HEADROOM:.0%} of headroom)"
        )


def _mfu(
    config: Config, gpus: int, gpu: str, vocab_size: int, seconds: float, speeds: Speeds, rows: SampledRows | None
) -> float:
    """Return the MFU of the last step, as in metrics.jsonl: relative to the bf16 peak."""
    work = work_of(config, gpus, gpu, vocab_size, last_window(config), rows)
    assert work.context is not None
    parameters, peak = count_active_parameters(config.model, vocab_size), gpus * speeds.gpu(gpu).bf16 * 1e12
    # under a causal mask a query sees half of its context on average
    return utilisation(config.model, parameters, work.tokens, 2 * work.context, seconds=seconds, peak=peak)


def _by_window(
    config: Config, gpus: int, gpu: str, vocab_size: int, speeds: Speeds, rows: SampledRows | None
) -> Iterator[str]:
    """Yield the step times of a layout by window."""
    seen = sorted({*windows(config), last_window(config)})
    if len(seen) < 2:
        return
    yield "\nwindow      s/step    attention's share"
    for window in seen:
        time = step_time(work_of(config, gpus, gpu, vocab_size, window, rows), speeds)
        yield f"{window:>8,}  {time.total:8.3f}    {time.attention / time.total:.0%}"
