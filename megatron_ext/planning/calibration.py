"""Fit the shares of a GPU's peak to timed steps, from a run's metrics or from benchmarks/step.py.

Steps under different windows have the same matrix products and different attention, which separates the two:

    seconds of a step = products / (peak x matmul's share) + attention / (peak x kernel's share) + the rest

The rest (memory traffic, collectives, optimizer) comes from `step_time`; the fitted shares absorb its errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from megatron_ext.config import ModelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.config.presets import PRESETS
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import METRICS_FILE, read_jsonl
from megatron_ext.planning.step_time import Speeds, Work, rank_work, step_time, work_of

WARMING = 2  # first steps of a run, excluded: kernels are compiled and caches filled
GROUPS = 10  # groups of a run's steps, by effective context
SPREAD = 0.05  # minimum difference of attention's part of a step's time; below it, attention's share cannot be fitted


@dataclass(frozen=True)
class Timed:
    """The work of a step and its measured seconds without waits for batches and checkpoints; `name` of the run."""

    name: str
    work: Work
    seconds: float


def read_timed(path: Path, gpu: str, gpus: int) -> list[Timed]:
    """Read a run's folder (its config.yaml and metrics.jsonl), or a JSON-lines file of benchmarks/step.py.

    Args:
        path: the folder or file.
        gpu: the GPU that it ran on.
        gpus: number of GPUs of a run; the benchmark uses one.

    Raises:
        UserError: the path is neither, or has no usable step.
    """
    timed = _of_run(path, gpu, gpus) if path.is_dir() else _of_benchmark(path, gpu) if path.is_file() else []
    if not timed:
        raise UserError(
            f"calibrate: got {path}, needs a run's folder with more than {WARMING} steps in its {METRICS_FILE}, or a "
            "file of benchmarks/step.py"
        )
    return timed


def _of_run(folder: Path, gpu: str, gpus: int) -> list[Timed]:
    """Group the steps of a run by their effective context, and take the lower quartile of each group's times.

    External delays lengthen steps, so the quartile is used; on an undisturbed GPU it equals the median.
    """
    config = parse(["--config", str(folder / "config.yaml")])
    vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
    records = [one for one in read_jsonl(folder / METRICS_FILE) if one["step"] >= WARMING and not one["skipped"]]
    records.sort(key=lambda one: one["effective_context"])
    whole = work_of(config, gpus, gpu, vocab_size, config.data.seq_length)
    timed = []
    for group in np.array_split(np.arange(len(records)), min(GROUPS, -(-len(records) // 3)) or 1):
        steps = [records[index] for index in group]
        if not steps:
            continue
        context = float(np.quantile([one["effective_context"] for one in steps], 0.25))  # as for the times
        work = replace(whole, context=context, exchanged=1.0)
        if sent := rank_work(work, head=True).context_bytes * gpus:  # if all keys were exchanged
            work = replace(work, exchanged=float(np.median([one["cp_bytes"] for one in steps])) / sent)
        seconds = [one["step_time_s"] - one["data_wait_s"] - one["save_stall_s"] for one in steps]
        timed.append(Timed(folder.name, work, float(np.quantile(seconds, 0.25))))
    return timed


def _of_benchmark(path: Path, gpu: str) -> list[Timed]:
    """Read a line for each shape and window."""
    timed = []
    for line in read_jsonl(path):
        if line.get("part") != "step" or "window" not in line:
            continue
        preset = PRESETS[line["preset"]] | {"num_layers": line["layers"], "vocab_size": line["vocab_size"]}
        work = Work(
            model=ModelConfig(**preset),
            gpu=gpu,
            world=1,
            row=line["seq_length"],
            rows=line["rows"],
            micro=line["micro"],
            context=line["effective_context"],
            recompute=float(line["recompute"] == "full"),
        )
        timed.append(Timed(f"{path.name}: {line['shape']}", work, line["seconds"]))
    return timed


def calibrate(timed: Sequence[Timed], speeds: Speeds) -> Speeds:
    """Fit the shares of one GPU's peak for matmul and attention to the logarithm of predicted over measured time.

    The loss is linear in large errors, so that groups of delayed steps have little influence. The GPU gets a row of
    shares of its own.

    Raises:
        UserError: scipy is not installed; or attention takes about the same part of all steps.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise UserError("calibrate: needs scipy, which is not installed; pip install scipy") from error

    name = timed[0].work.gpu
    gpu = speeds.gpu(name)
    start = speeds.reached[gpu.family]
    kernel = start.kernel(timed[0].work.attention_backend)

    def with_shares(logarithms: Sequence[float]) -> Speeds:
        matmul, attention = (math.exp(float(value)) for value in logarithms)
        own = replace(start, **{"matmul": matmul, kernel: attention})
        gpus = speeds.gpus | {name: replace(gpu, family=name)}  # other GPUs of the family keep theirs
        return replace(speeds, gpus=gpus, reached=speeds.reached | {name: own})

    def errors(logarithms: Sequence[float]) -> list[float]:
        fitted = with_shares(logarithms)
        return [math.log(step_time(one.work, fitted).total / one.seconds) for one in timed]

    begin = [math.log(start.matmul), math.log(getattr(start, kernel))]
    fitted = with_shares(least_squares(errors, begin, loss="soft_l1", f_scale=0.05).x)
    parts = [step_time(one.work, fitted) for one in timed]
    shares = [part.attention / part.total for part in parts]
    if max(shares) - min(shares) < SPREAD:
        raise UserError(
            f"calibrate: got steps of which attention takes {min(shares):.1%} to {max(shares):.1%}, needs parts that "
            f"differ by {SPREAD:.0%}, or its share is undetermined; give a run whose window grows or with longer rows"
        )
    return fitted


def describe_calibration(timed: Sequence[Timed], fitted: Speeds) -> Iterator[str]:
    """Yield the fitted shares, and each residual."""
    gpu = timed[0].work.gpu
    own = fitted.reached[gpu]
    kernel = own.kernel(timed[0].work.attention_backend)
    yield f"{gpu}: matmul {own.matmul:.4g}, {kernel} {getattr(own, kernel):.4g} of its peak"
    yield f"{'context':>10} {'measured, s':>12} {'predicted, s':>13} {'error':>7}"
    errors = []
    for one in timed:
        predicted = step_time(one.work, fitted).total
        errors.append(predicted / one.seconds - 1)
        context = one.work.effective_context
        yield f"{context:10,.0f} {one.seconds:12.4g} {predicted:13.4g} {errors[-1]:+7.1%}  {one.name}"
    sizes = np.abs(errors)
    yield f"{len(sizes)} groups of steps: median error {np.median(sizes):.1%}, largest {sizes.max():.1%}"


def dump_speeds(speeds: Speeds, note: str) -> str:
    """Write a file that `read_speeds` reads; `note` says where it comes from."""
    head = f"# {note}\n# The fields are explained in megatron_ext/planning/facts/gpus.yaml.\n"
    return head + yaml.safe_dump(asdict(speeds), sort_keys=False, default_flow_style=None, width=160)
