"""Read the metrics of a finished, running or killed run from its folder."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError
from megatron_ext.monitoring.history import History, read_history
from megatron_ext.monitoring.metrics import EVALUATION_FILE, METRICS_FILE, read_by_step
from megatron_ext.monitoring.stability import VOLATILITY_SPAN, Stability, stability
from megatron_ext.token_weighting.passage import PASSAGE_FILE, Passage

CONFIG_FILE = "config.yaml"
LOSSES = ("lm_loss", "train_loss")
CLOCKS = {"consumed_tokens": ("consumed_tokens", 1.0), "flops": ("flops", 1.0), "hours": ("step_time_s", 3600.0)}

Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values [n] at increasing steps [n]; NaN where a value was not finite."""

    steps: Column
    values: Column

    def finite(self) -> Curve:
        """Return the points whose value is finite."""
        known = np.isfinite(self.values)
        return Curve(self.steps[known], self.values[known])


@dataclass(frozen=True)
class Mixture:
    """The rows that a run has drawn from each of its D datasets.

    Attributes:
        names: [D].
        requested: [D], the requested shares of the tokens.
        steps: [n], the steps that record it.
        shares: [n, D], shares of all tokens drawn up to and including each of these steps.
    """

    names: tuple[str, ...]
    requested: Column
    steps: Column
    shares: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    Attributes:
        records: one per optimizer step, by increasing step; never empty.
        evaluations: one per evaluated step, by increasing step.
        config: text of config.yaml; empty if there is none.
        passage: a passage with its latest token weights; None without token weighting.
        history: when and where the run was started, and how it ended.
    """

    name: str
    folder: Path
    records: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    config: str
    passage: Passage | None
    history: History

    def curve(self, key: str) -> Curve:
        """Return a training metric at every step; NaN if it is missing, or for a loss without trained tokens."""
        nothing = [key in LOSSES and record.get("denominator") == 0 for record in self.records]
        values = [None if none else record.get(key) for record, none in zip(self.records, nothing, strict=True)]
        return _curve(self.records, values)

    def reduced(self, key: str, reduce: Callable[[Column], Any]) -> float | None:
        """Reduce the finite values of a training metric to one number; None if there are none."""
        values = self.curve(key).finite().values
        return float(reduce(values)) if values.size else None

    def validation(self) -> Curve:
        """Return the validation loss in nats; `steps` counts completed steps, so 0 is before training."""
        return _curve(self.evaluations, [record.get("valid_loss") for record in self.evaluations])

    def validation_by_length(self) -> dict[int, Curve]:
        """Return the validation loss at each evaluation length in tokens, shortest first."""
        by_length = [record.get("by_length", {}) for record in self.evaluations]
        lengths = sorted({length for losses in by_length for length in losses}, key=int)
        return {
            int(length): _curve(self.evaluations, [losses.get(length) for losses in by_length]) for length in lengths
        }

    def losses_by_position(self) -> dict[int, dict[int, float]]:
        """Return by step the validation losses of tokens that see at least p and fewer than 2p tokens, by p."""
        return {
            record["step"]: {int(position): loss for position, loss in record["by_position"].items()}
            for record in self.evaluations
            if record.get("by_position")
        }

    def by_layer(self, key: str) -> tuple[Column, npt.NDArray[np.float64]]:
        """Return a metric that some steps have for each layer: their steps [n] and its values [n, layers]."""
        known = [record for record in self.records if record.get(key)]
        curve = _curve(known, [record[key] for record in known])
        return curve.steps, curve.values

    def clock(self, name: str) -> Column | None:
        """Return the total consumed_tokens, flops or hours (in steps) at the end of each recorded step.

        None if a record lacks it, or the first steps are missing.
        """
        key, unit = CLOCKS[name]
        values = self.curve(key).values
        if not np.isfinite(values).all() or (name != "consumed_tokens" and self.records[0]["step"] != 0):
            return None
        return values if name == "consumed_tokens" else np.cumsum(values) / unit

    def mixture(self) -> Mixture | None:
        """Sum up the rows drawn from each dataset, each as its dataset's average tokens; None if not recorded."""
        known = [record for record in self.records if record.get("source_rows")]
        sources: dict[str, dict[str, float]] = {}
        for start in self.history.starts:
            sources |= start.get("sources", {})
        if not known or not sources:
            return None
        rows = np.array([[record["source_rows"].get(name, 0) for name in sources] for record in known])
        tokens = np.cumsum(rows * [source["row_tokens"] for source in sources.values()], axis=0)
        return Mixture(
            names=tuple(sources),
            requested=np.array([source["share"] for source in sources.values()]),
            steps=np.array([record["step"] for record in known], dtype=np.float64),
            shares=tokens / tokens.sum(axis=1, keepdims=True),
        )

    def flops_saved(self) -> float | None:
        """Return the share of FLOPs saved against as many median steps at the last window; None below ten of these."""
        windows, flops = self.curve("window").values, self.curve("flops").values
        last = (windows == windows[-1]) & np.isfinite(flops)
        if last.sum() < 10 or not np.isfinite(flops).all():
            return None
        return float(1.0 - flops.sum() / (np.median(flops[last]) * flops.size))


def _curve(records: Sequence[Mapping[str, Any]], values: Sequence[Any]) -> Curve:
    """Return the values, None as NaN."""
    steps = np.array([record["step"] for record in records], dtype=np.float64)
    return Curve(steps, np.array(values, dtype=np.float64))


def loss_difference(first: Run, second: Run) -> tuple[float, float] | None:
    """Return the mean and the standard deviation of the training losses of `second` minus those of `first`, in nats.

    Over the last tenth of the steps that both have, at least ten; None if these are fewer than 20. Pairing by step
    removes the variation that both share because they read the same rows in the same order. Steps are correlated, so
    this is no confidence interval.
    """
    losses = []
    for run in (first, second):
        known = run.curve("lm_loss").finite()
        losses.append(dict(zip(known.steps, known.values, strict=True)))
    common = sorted(losses[0].keys() & losses[1].keys())
    if len(common) < 20:
        return None
    last = [losses[1][step] - losses[0][step] for step in common[-max(len(common) // 10, 10) :]]
    return float(np.mean(last)), float(np.std(last, ddof=1))


def load_run(folder: Path | str, name: str | None = None) -> Run:
    """Read a run folder; a half-written last line is ignored, and the last record of each step counts.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt, or `passage.json` is damaged.
    """
    folder = Path(folder)
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path}: not found; give the folder that training was started with as --save")
    records = read_by_step(path)
    if not records:
        raise UserError(f"{path}: holds no complete step, a report needs at least one; train a step first")
    evaluation, config = folder / EVALUATION_FILE, folder / CONFIG_FILE
    return Run(
        name=name if name is not None else folder.resolve().name,
        folder=folder,
        records=records,
        evaluations=read_by_step(evaluation) if evaluation.is_file() else (),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        passage=Passage.read(folder) if (folder / PASSAGE_FILE).is_file() else None,
        history=read_history(folder),
    )


def stage_folders(run: Path) -> list[Path]:
    """List the stage folders of a run by the recorded time of their first steps; [] for a run without stages."""
    if (run / METRICS_FILE).is_file():
        return []
    started = {}
    for path in run.glob(f"*/{METRICS_FILE}"):
        records = read_by_step(path)
        started[path.parent] = records[0]["time"] if records else math.inf
    return sorted(started, key=lambda folder: (started[folder], folder.name))


def load_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read several run folders; each is named by its path from the folder that they have in common."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(paths) == 1:
        return [load_run(paths[0])]
    common = os.path.commonpath(paths)
    return [load_run(path, str(path.relative_to(common))) for path in paths]


def stability_between(run: Run, first: int, end: int) -> Stability:
    """Compute the four stability figures of steps `first` to `end` - 1, ignoring steps that are not finite.

    Raises:
        UserError: fewer than 10 of these steps are recorded; the volatility needs spans of 10.
    """
    losses, norms = run.curve("lm_loss"), run.curve("grad_norm").values
    chosen = (losses.steps >= first) & (losses.steps < end) & np.isfinite(losses.values) & np.isfinite(norms)
    if np.count_nonzero(chosen) < VOLATILITY_SPAN:
        raise UserError(
            f"stability_steps: got {first} {end}, of which {run.folder} has {np.count_nonzero(chosen)} finite steps, "
            f"needs {VOLATILITY_SPAN}; its steps are {int(losses.steps[0])} to {int(losses.steps[-1])}"
        )
    return stability(losses.values[chosen], norms[chosen])
