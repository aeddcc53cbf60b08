"""Format the result of a search: a table of layouts, the bottleneck, how often to save, what the schedule saves."""

import math
from collections.abc import Iterator

from megatron_ext.checkpoint.hf.names import count_active_parameters, count_parameters
from megatron_ext.config import Config
from megatron_ext.config.checks import mistakes
from megatron_ext.planning.flops import utilisation
from megatron_ext.planning.memory import HEADROOM
from megatron_ext.planning.run_plan import gibibytes
from megatron_ext.planning.search import Found, Layout, last_window, layout_of, windows
from megatron_ext.planning.step_time import Machine, step_time

MOST_REASONS = 8
GPU_HOURS_PER_FAILURE = 50_676  # arXiv 2407.21783, 3.3.4: 419 unexpected interruptions of 16,384 H100 in 54 days
SAVE_SECONDS = 10.0  # assumed: fixed cost of a save, without writing its bytes (plan, barrier, manifest)
RESTART_SECONDS = 600.0  # assumed: detecting the failure, starting the processes, reading the checkpoint


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
    yield _row("own", layout_of(config, machine), machine) if wrong is None else f"own {wrong}"
    yield (
        f"s/step, tokens/s and MFU at the last window ({last_window(config):,} tokens), with the share of {kernel}; "
        "hours and cost of the whole run; own: the configuration's layout"
    )
    parts = sorted(vars(best.last).items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / best.last.total:.0%}" for name, seconds in parts if seconds > 0)
    yield f"\nthe first layout, at the last window: {shares}"
    yield _saving(config, machine)
    saved = 1 - best.seconds / step_time(best.config, max(windows(config)), machine).total
    if saved > 0:
        yield f"the window schedule saves {saved:.1%} of the time of a constant window"


def _row(name: str, layout: Layout, machine: Machine) -> str:
    seconds, gpus, config = layout.last.total, machine.gpus, layout.config
    tokens = config.data.global_batch_size * config.data.seq_length
    mfu = utilisation(  # as in metrics.jsonl: relative to the bf16 peak
        config.model,
        count_active_parameters(config.model, machine.vocab_size),
        tokens,
        machine.attention(config, last_window(config)).context,
        seconds=seconds,
        peak=gpus * machine.kind.bf16 * 1e12,
    )
    return (
        f"{name:>3} {layout.name:58} {seconds:8.2f} {tokens / seconds / gpus:12,.0f} {mfu:6.1%} "
        f"{gibibytes(layout.memory):>10} {layout.hours:8,.1f} "
        f"{f'${layout.hours * gpus * machine.kind.hour:,.0f}':>11}  {layout.last.bound}"
    )


def _saving(config: Config, machine: Machine) -> str:
    """Describe how often to save, and the fraction of the time that is progress."""
    # the weights, and the fp32 optimizer state of each
    written = (14 if config.training.bf16 else 12) * count_parameters(config.model, machine.vocab_size) / machine.gpus
    stall = SAVE_SECONDS + (0 if config.checkpoint.async_save else written / 1e9 / machine.speeds.storage)
    failure = GPU_HOURS_PER_FAILURE * 3600 / machine.gpus
    interval = young_interval(stall, failure)
    return (
        f"failures: one every {failure / 3600:,.1f} hours; saving every {interval / 60:,.1f} minutes (Young) leaves "
        f"{1 / daly_slowdown(interval, stall, RESTART_SECONDS, failure):.1%} of the time for progress"
    )


def young_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return approximately the best seconds of work between two saves (Young, Communications of the ACM 17, 1974)."""
    return math.sqrt(2 * save_seconds * failure_seconds)


def daly_slowdown(interval: float, save_seconds: float, restart_seconds: float, failure_seconds: float) -> float:
    """Return the expected time of a run over its time without saves and failures.

    With failures at a constant rate, M seconds apart on average for the whole job, saves that stop training for d
    seconds, restarts that take R, and tau seconds of work between saves, it is M e^(R/M) (e^((tau + d)/M) - 1) / tau
    (Daly, Future Generation Computer Systems 22, 2006, equation 20).
    """
    cycle = math.expm1((interval + save_seconds) / failure_seconds)
    return failure_seconds * math.exp(restart_seconds / failure_seconds) * cycle / interval


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
