"""Fit the efficiencies of a GPU (shares of its peak) to timed steps, from a run's metrics or from benchmarks/step.py.

Steps under different windows have the same matrix products and different attention, which separates the two:

    seconds of a step = products / (peak x matmul's share) + attention / (peak x kernel's share) + the rest

The rest (memory traffic, collectives, optimizer) comes from `step_time`; the fitted shares absorb its errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.config.presets import PRESETS
from megatron_ext.config.vocabulary import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import METRICS_FILE, read_jsonl
from megatron_ext.planning.step_time import Shapes, Speeds, Work, rank_work, step_time, work_of

WARMING = 2  # first steps of a run, excluded: kernels are compiled and caches filled
GROUPS = 10  # groups of a run's steps, by effective context
SPREAD = 0.05  # minimum difference of attention's part of a step's time; below it, attention's share cannot be fitted


@dataclass(frozen=True)
class Timed:
    """Work and its measured time.

    Attributes:
        name: of the run or file.
        work: of one step.
        seconds: measured time, excluding waits for batches and checkpoints.
    """

    name: str
    work: Work
    seconds: float


@dataclass(frozen=True)
class Calibrated:
    """The fitted shares and the error of each group of steps.

    Attributes:
        speeds: including the GPU's own row of shares.
        timed: the timed steps.
        errors: predicted over measured minus one, for each.
    """

    speeds: Speeds
    timed: tuple[Timed, ...]
    errors: tuple[float, ...]


def read_timed(path: Path, gpu: str, gpus: int) -> list[Timed]:
    """Read a run's folder (its config.yaml and metrics.jsonl), or a JSON-lines file of benchmarks/step.py.

    Args:
        path: the folder or file.
        gpu: the GPU that it ran on.
        gpus: number of GPUs of a run; the benchmark uses one.

    Raises:
        UserError: the path is neither, or has no usable step.
    """
    if path.is_dir():
        return _of_run(path, gpu, gpus)
    if path.is_file():
        return _of_benchmark(path, gpu)
    raise UserError(f"calibrate: got {path}, needs a run's folder with {METRICS_FILE}, or a file of benchmarks/step.py")


def _of_run(folder: Path, gpu: str, gpus: int) -> list[Timed]:
    """Group the steps of a run by their effective context, and take the lower quartile of each group's times.

    External delays lengthen steps, so the quartile is used; on an undisturbed GPU it equals the median.
    """
    config = parse(["--config", str(folder / "config.yaml")])
    vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
    records = [one for one in read_jsonl(folder / METRICS_FILE) if one["step"] >= WARMING and not one["skipped"]]
    if not records:
        raise UserError(f"calibrate: {folder / METRICS_FILE}: got no step from {WARMING} on, needs some; train longer")
    records.sort(key=lambda one: one["effective_context"])
    groups = np.array_split(np.arange(len(records)), min(GROUPS, -(-len(records) // 3)))
    return [_of_steps(config, [records[index] for index in group], folder, gpu, gpus, vocab_size) for group in groups]


def _of_steps(
    config: Config, records: Sequence[dict[str, Any]], folder: Path, gpu: str, gpus: int, vocab_size: int
) -> Timed:
    context = float(np.quantile([one["effective_context"] for one in records], 0.25))  # as for the times
    work = work_of(config, gpus, gpu, vocab_size, config.data.seq_length)
    work = replace(work, context=context / 2, segment=context, exchanged=1.0, prepared=0, save_every=0)
    sent = rank_work(work, head=True).context_bytes * gpus  # bytes if all keys were exchanged
    if sent:
        work = replace(work, exchanged=float(np.median([one["cp_bytes"] for one in records])) / sent)
    waits = ("data_wait_s", "save_stall_s")
    seconds = [one["step_time_s"] - sum(one[wait] for wait in waits) for one in records]
    return Timed(folder.name, work, float(np.quantile(seconds, 0.25)))


def _of_benchmark(path: Path, gpu: str) -> list[Timed]:
    """Read a line for each shape and window."""
    timed = []
    for line in read_jsonl(path):
        if line.get("part") != "step" or "window" not in line:
            continue
        shapes = replace(Shapes.of(ModelConfig(**PRESETS[line["preset"]]), line["vocab_size"]), layers=line["layers"])
        work = Work(
            shapes=shapes,
            gpu=gpu,
            world=1,
            row=line["seq_length"],
            rows=line["rows"],
            micro=line["micro"],
            context=line["effective_context"] / 2,
            segment=line["effective_context"],
            recompute=float(line["recompute"] == "full"),
        )
        timed.append(Timed(f"{path.name}: {line['shape']}", work, line["seconds"]))
    if not timed:
        raise UserError(f"calibrate: got {path} without a line of benchmarks/step.py, needs some; or a run's folder")
    return timed


def calibrate(timed: Sequence[Timed], speeds: Speeds) -> Calibrated:
    """Fit the shares of one GPU's peak for matmul and attention to the logarithm of predicted over measured time.

    The loss is linear in large errors, so that groups of delayed steps have little influence.

    Raises:
        UserError: scipy is not installed; or attention takes about the same part of all steps.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise UserError("calibrate: needs scipy, which is not installed; pip install scipy") from error

    gpu, kernel = timed[0].work.gpu, timed[0].work.kernel
    assert all(one.work.gpu == gpu and one.work.kernel == kernel for one in timed)
    card = speeds.gpu(gpu)
    start = speeds.reached[card.family]

    def having(shares: Sequence[float]) -> Speeds:
        own = replace(start, **{"matmul": float(shares[0]), kernel: float(shares[1])})
        # a separate row: other GPUs of the family keep theirs
        return replace(speeds, gpus=speeds.gpus | {gpu: replace(card, family=gpu)}, reached=speeds.reached | {gpu: own})

    def errors(logarithms: Sequence[float]) -> list[float]:
        there = having([math.exp(value) for value in logarithms])
        return [math.log(step_time(one.work, there).total / one.seconds) for one in timed]

    begin = [math.log(start.matmul), math.log(getattr(start, kernel))]
    fitted = having([math.exp(float(value)) for value in least_squares(errors, begin, loss="soft_l1", f_scale=0.05).x])
    parts = [step_time(one.work, fitted) for one in timed]
    shares = [part.attention / part.total for part in parts]
    if max(shares) - min(shares) < SPREAD:
        raise UserError(
            f"calibrate: got steps of which attention takes {min(shares):.1%} to {max(shares):.1%}, needs parts that "
            f"differ by {SPREAD:.0%}, or its share is undetermined; give a run whose window grows or with longer rows"
        )
    return Calibrated(
        fitted, tuple(timed), tuple(part.total / one.seconds - 1 for part, one in zip(parts, timed, strict=True))
    )


def describe_calibration(found: Calibrated) -> list[str]:
    """Yield the fitted shares, and each residual."""
    gpu, kernel = found.timed[0].work.gpu, found.timed[0].work.kernel
    own = found.speeds.reached[gpu]
    lines = [f"{gpu}: matmul {own.matmul:.4g}, {kernel} {getattr(own, kernel):.4g} of its peak"]
    lines += [f"{'context':>10} {'measured, s':>12} {'predicted, s':>13} {'error':>7}"]
    for one, error in zip(found.timed, found.errors, strict=True):
        assert one.work.context is not None
        predicted = one.seconds * (1 + error)
        lines.append(f"{2 * one.work.context:10,.0f} {one.seconds:12.4g} {predicted:13.4g} {error:+7.1%}  {one.name}")
    sizes = [abs(error) for error in found.errors]
    lines.append(f"{len(sizes)} groups of steps: median error {np.median(sizes):.1%}, largest {max(sizes):.1%}")
    return lines


def dump_speeds(speeds: Speeds, note: str) -> str:
    """Write a file that `read_speeds` reads.

    Args:
        speeds: the content.
        note: a description of their origin.
    """
    head = f"# {note}\n# What the numbers are stands in megatron_ext/planning/facts/gpus.yaml.\n"
    return head + yaml.safe_dump(asdict(speeds), sort_keys=False, default_flow_style=None, width=160)
