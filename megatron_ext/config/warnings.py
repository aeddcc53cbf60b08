"""Warn of probably unintended effects of a configuration: one line each, with a remedy.

A dry run and training print the same warnings. A configuration that cannot run is an error (checks.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from megatron_ext.config import Config
from megatron_ext.schedule import ScheduleKind

LONG = 10**8  # number of tokens for which a crash is costly: hours on a laptop even with a tiny model
SHARE = 0.64  # the best fraction of the steps for window growth (arXiv 2503.15450)


def keeps_weights(config: Config) -> bool:
    """Return whether the run's last weights are saved anywhere."""
    return config.checkpoint.save is not None or config.checkpoint.dump_trajectory is not None


def warnings_of(config: Config) -> Iterator[str]:
    """Yield one line for each warning about a configuration that `checks.check` accepts."""
    if not keeps_weights(config):
        yield "save: got nothing, so the weights are lost at the end of the run; add --save FOLDER to keep them"
    yield from _saving(config)
    yield from _window(config)
    yield from _weighting(config)


def _saving(config: Config) -> Iterator[str]:
    options, steps = config.checkpoint, config.training.train_iters
    tokens = steps * config.data.global_batch_size * config.data.seq_length
    if options.save is not None and not options.save_interval and not options.save_seconds and tokens >= LONG:
        yield (
            f"save_interval: got 0 and save_seconds 0, so a crash or a lost node costs up to all {steps:,} steps; "
            "add --save-seconds 1800"
        )


def _window(config: Config) -> Iterator[str]:
    schedule, steps = config.window_schedule(), config.training.train_iters
    full = schedule.expansion_steps
    if full <= steps:
        return
    if schedule.kind is ScheduleKind.CONTINUAL:
        remedy = f"use --window-switch-step {round(SHARE * steps)}"
    else:
        ramps = round(full / schedule.ramp_steps)
        remedy = f"use --window-expansion-fraction {SHARE / ramps:.2g} instead of a rate"
    first, last = schedule.window_at(0), schedule.window_at(steps - 1)
    yield (
        f"window_schedule: got {schedule.kind.value} with a window of {first:,} tokens at the first and {last:,} at "
        f"the last of {steps:,} steps, {schedule.end:,} only from step {full:,} on; {remedy}"
    )


def _weighting(config: Config) -> Iterator[str]:
    weighting, schedule, steps = config.weighting, config.window_schedule(), config.training.train_iters
    if weighting.token_weighting != "unfrozen" or not weighting.needs_short_losses:
        return
    if config.window.local_window_fixed:
        return  # local layers see beyond the window
    short = weighting.short()
    same = short.length - short.stride  # a scored token has at least this many tokens before it in its chunk
    # bisect needs increasing windows: those of a cyclic schedule increase only in its first ramp
    rising = min(steps, max(int(schedule.ramp_steps), 1)) if "cyclic" in schedule.kind.value else steps
    uniform = bisect_right(range(rising), same, key=schedule.window_at)
    if uniform:
        yield (
            f"short_context: got {short.length}, but while the window is at most short_context - short_stride = {same} "
            f"tokens, in the first {uniform:,} of {steps:,} steps, every weight is 1; raise --window-start above "
            f"{same} or lower --short-context"
        )
