"""Measure whole optimizer steps of the papers' shapes: tokens/s, MFU, peak memory, and the schedule's time savings.

For each shape, steps are timed under the windows of 20 evenly spaced moments of its schedule, each distinct window
once; the saving is 1 - (mean of the 20 times) / (time at the full window), next to the same quotient of FLOPs, which
bounds it. MFU counts the FLOPs of the causal mask, forward plus twice that for backward, against 989 TFLOP/s (H100 and
H200, dense bf16); recomputation does not count. The peak is shown next to the estimate of --dry-run.

python benchmarks/step.py [SHAPE ...] [--recompute] [--profile] [--output results.jsonl]
    SHAPE   120M-8K 360M-8K 1B-8K 1B-32K 8B-8K 8B-32K; those of 8B have 4 of its 32 layers
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from record import CUDA, Records, add_output
from training import Training, forward_flops, shape

from megatron_ext.config import Config
from megatron_ext.engine import parallel
from megatron_ext.planning.memory import estimate
from megatron_ext.schedule import build_schedule

PEAK_FLOPS = 989e12
MOMENTS = 20


@dataclass(frozen=True)
class Shape:
    """A model, its rows, and the run whose windows are sampled (arXiv 2503.15450, Tables 8 and 11: 100B tokens).

    Attributes:
        preset: of megatron_ext.config.presets.
        length: tokens of a row.
        rows: of a step, in micro-batches of `micro`.
        rate: tokens by which the window grows in a step of the paper's run, which has `steps`.
        mfu: the goal at the full window.
        saving: the goal, as a share of the step's time.
    """

    preset: str
    length: int
    rows: int
    micro: int = 1
    layers: int | None = None
    rate: float = 0.125
    steps: int = 95_367  # steps of 1,048,576 tokens
    mfu: float | None = None
    saving: float | None = None

    def config(self, recompute: str | None) -> Config:
        """Return the configuration for one process."""
        built = shape(self.preset, self.length, self.rows, layers=self.layers, recompute_granularity=recompute)
        return replace(built, data=replace(built.data, micro_batch_size=self.micro))

    def windows(self) -> list[int]:
        """Return the windows at evenly spaced moments of the run."""
        schedule = build_schedule(kind="linear", start=32, end=self.length, rate=self.rate)
        return [schedule.window_at(int((k + 0.5) / MOMENTS * self.steps)) for k in range(MOMENTS)]


SHAPES = {
    "120M-8K": Shape("120M", 8192, rows=8, micro=4),
    "360M-8K": Shape("360M", 8192, rows=8, micro=4),
    "1B-8K": Shape("1B", 8192, rows=4, mfu=0.45, saving=0.131),
    "1B-32K": Shape("1B", 32768, rows=1, rate=0.5, saving=0.222),
    "8B-8K": Shape("Llama-3-8B", 8192, rows=4, layers=4),
    "8B-32K": Shape("Llama-3-8B", 32768, rows=1, layers=4, rate=0.5, mfu=0.50),
    "dry-run": Shape("tiny-1M", 256, rows=2, rate=0.01),
}


def measure(name: str, records: Records, recompute: str | None, *, profile: bool) -> None:
    """Time a shape under its windows; record a line per window, and one for the shape."""
    chosen = SHAPES[name]
    config = chosen.config(recompute)
    facts: dict[str, Any] = {"shape": name, "layers": config.model.num_layers, "recompute": recompute or "none"}
    training = Training(config)
    windows = chosen.windows()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times, flops = {}, {}
    for window in sorted({*windows, chosen.length}, reverse=True):  # the full window first: it has the peak
        batches = training.batches(config, 0, window)
        seen = [training.seconds(batches) for _ in range(4 if CUDA else 2)]
        times[window], flops[window] = statistics.median(seen[1:]), 3 * forward_flops(config, batches.train)
        tokens = chosen.rows * chosen.length
        records.add(
            **facts,
            window=window,
            seconds=round(times[window], 4),
            tokens_per_s=round(tokens / times[window]),
            mfu=round(flops[window] / times[window] / PEAK_FLOPS, 4),
        )
    saved = 1 - statistics.mean(times[w] for w in windows) / times[chosen.length]
    bound = 1 - statistics.mean(flops[w] for w in windows) / flops[chosen.length]
    mfu = flops[chosen.length] / times[chosen.length] / PEAK_FLOPS
    goals = {"mfu_goal": chosen.mfu, "saving_goal": chosen.saving}
    summary: dict[str, Any] = {"summary": True, "mfu": round(mfu, 4), "saved": round(saved, 4)}
    summary |= {"flops_bound": round(bound, 4), **{goal: value for goal, value in goals.items() if value is not None}}
    if chosen.mfu is not None or chosen.saving is not None:
        met = chosen.mfu is None or mfu >= chosen.mfu
        summary["met"] = met and (chosen.saving is None or saved >= max(chosen.saving, 0.9 * bound))
    if CUDA:
        expected = estimate(config, 1, training.vocab_size).total
        peak = torch.cuda.max_memory_allocated()
        summary |= {"peak_bytes": peak, "estimated_bytes": expected, "peak_over_estimate": round(peak / expected, 3)}
    records.add(**facts, **summary)
    if profile:
        records.add(**facts, kernels=kernel_table(training, config))
    parallel.stop()


def kernel_table(training: Training, config: Config, rows: int = 25) -> list[dict[str, Any]]:
    """Return the operators and kernels of one full-window step that take the most time, in microseconds."""
    batches = training.batches(config, 1, config.data.seq_length)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if CUDA else []
    with torch.profiler.profile(activities=activities) as profiler:
        training.seconds(batches)
    key = "self_device_time_total" if CUDA else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
    return [{"name": one.key[:100], "calls": one.count, "us": round(getattr(one, key))} for one in events[:rows]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in SHAPES if (name == "dry-run") != CUDA]
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", default=default)
    parser.add_argument("--recompute", action="store_true", help="recompute whole layers, where memory is short")
    parser.add_argument("--profile", action="store_true", help="add the kernels that take the most time")
    add_output(parser)
    options = parser.parse_args()
    for name in set(options.shapes) - SHAPES.keys():
        parser.error(f"SHAPE: got {name!r}, needs one of {', '.join(SHAPES)}")
    if len(options.shapes) > 1:  # a separate process for each: running out of memory does not affect the others
        flags = [argument for argument in sys.argv[1:] if argument not in options.shapes]
        done = [subprocess.run([sys.executable, __file__, one, *flags], check=False) for one in options.shapes]
        return int(any(one.returncode for one in done))
    (name,) = options.shapes
    records = Records("step", options.output)
    try:
        measure(name, records, "full" if options.recompute else None, profile=options.profile)
    except torch.OutOfMemoryError as error:
        records.error(error, shape=name, recompute="full" if options.recompute else "none")
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
