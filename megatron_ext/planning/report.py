"""Format the result of a search: a table of layouts, the bottleneck, and the gain from more memory."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.checkpoint.hf.names import count_active_parameters, count_parameters
from megatron_ext.config import Config
from megatron_ext.config.checks import mistakes
from megatron_ext.planning.flops import utilisation
from megatron_ext.planning.goodput import (
    GPU_HOURS_PER_FAILURE,
    RESTART_SECONDS,
    SAVE_SECONDS,
    daly_slowdown,
    young_interval,
)
from megatron_ext.planning.memory import HEADROOM
from megatron_ext.planning.run_plan import gibibytes
from megatron_ext.planning.search import Found, Layout, Machine, last_window, windows
from megatron_ext.planning.step_time import work_of

MOST_REASONS = 8


def describe(found: Found, config: Config, machine: Machine) -> Iterator[str]:
    """Yield the lines for `found`, the result of a search of `config`."""
    if not found.best:
        yield from _refusals(found, machine)
        return
    gpus, gpu, best = machine.gpus, machine.kind, found.best[0]
    kernel = machine.speeds.reached[gpu.family].kernel(config.parallel.attention_backend)
    yield f"{found.tried:,} layouts on {gpus:,} {machine.gpu} of {gpu.memory:.0f} GiB; the fastest that fit:"
    heads = f"{'s/step':>8} {'tokens/s/GPU':>12} {'MFU':>6} {'memory':>10} {'hours':>8} {'cost':>11}  bound by"
    yield f"{'':>3} {'layout':58} {heads}"
    for number, layout in enumerate(found.best, 1):
        yield _row(f"{number}", layout, machine)
    wrong = next(mistakes(config, gpus), None)
    yield _row("own", machine.layout(config), machine) if wrong is None else f"own {wrong}"
    yield (
        f"s/step, tokens/s and MFU at the last window ({last_window(config):,} tokens), with the share of {kernel}; "
        "hours and cost of the whole run; own: the configuration's layout"
    )
    parts = sorted(vars(best.last).items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / best.last.total:.0%}" for name, seconds in parts if seconds > 0)
    yield f"\nthe first layout, at the last window: {shares}"
    # the weights, and the fp32 optimizer state of each
    written = (14 if config.training.bf16 else 12) * count_parameters(config.model, machine.vocab_size) / gpus
    stall = SAVE_SECONDS + (0 if config.checkpoint.async_save else written / 1e9 / machine.speeds.storage)
    failure = GPU_HOURS_PER_FAILURE * 3600 / gpus
    interval = young_interval(stall, failure)
    yield (
        f"failures: one every {failure / 3600:,.1f} hours; saving every {interval / 60:,.1f} minutes (Young) leaves "
        f"{1 / daly_slowdown(interval, stall, RESTART_SECONDS, failure):.1%} of the time for progress"
    )
    saved = 1 - best.seconds / machine.step(best.config, max(windows(config))).total
    if saved > 0:
        yield f"the window schedule saves {saved:.1%} of the time of a constant window"


def _row(name: str, layout: Layout, machine: Machine) -> str:
    seconds, gpus, config = layout.last.total, machine.gpus, layout.config
    work = work_of(config, gpus, machine.gpu, machine.vocab_size, last_window(config), machine.rows)
    mfu = utilisation(  # as in metrics.jsonl: relative to the bf16 peak
        config.model,
        count_active_parameters(config.model, machine.vocab_size),
        work.tokens,
        work.effective_context,
        seconds=seconds,
        peak=gpus * machine.kind.bf16 * 1e12,
    )
    return (
        f"{name:>3} {layout.name:58} {seconds:8.2f} {work.tokens / seconds / gpus:12,.0f} {mfu:6.1%} "
        f"{gibibytes(layout.memory):>10} {layout.hours:8,.1f} "
        f"{f'${layout.hours * gpus * machine.kind.hour:,.0f}':>11}  {layout.last.bound}"
    )


def _refusals(found: Found, machine: Machine) -> Iterator[str]:
    """Yield why no layout is possible: each reason with the number of layouts that it excludes."""
    memory = machine.kind.memory
    yield f"None of {found.tried:,} layouts on {machine.gpus:,} {machine.gpu} is possible:"
    reasons = found.refused.most_common(MOST_REASONS)
    for reason, number in reasons:
        yield f"  {number:,} layouts: {reason}"
    if len(found.refused) > len(reasons):
        yield f"  and {len(found.refused) - len(reasons):,} more reasons"
    if found.too_large:
        smallest = min(layout.memory for layout in found.too_large)
        yield (
            f"  {len(found.too_large):,} layouts: memory; the smallest needs {gibibytes(smallest)}, "
            f"available are {memory * (1 - HEADROOM):.1f} GiB ({memory:.0f} GiB less {HEADROOM:.0%} of headroom)"
        )
