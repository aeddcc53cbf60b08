"""Read the metrics of a finished, running or killed run from its folder, and compute figures from them."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ext.arrays import Float64
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import EVALUATION_FILE, METRICS_FILE, History, read_by_step, read_history, scalars
from megatron_ext.token_weighting.passage import PASSAGE_FILE, Passage

VOLATILITY_SPAN = 10  # SkyLadder's L[t-9..t]


class Curve(NamedTuple):
    """The finite values [n] of a metric at increasing steps [n]."""

    steps: Float64
    values: Float64


Curves = Mapping[str, Curve]


@dataclass(frozen=True)
class Run:
    """The contents of a run folder."""

    name: str
    folder: Path
    steps: int  # completed, at least 1
    # by the names that TensorBoard shows: `attention_entropy/layer_1`; a step without trained tokens has no loss
    train: Curves
    validation: Curves  # here a step counts completed steps, so 0 is before training
    config: str  # text of config.yaml; empty if there is none
    passage: Passage | None  # with its latest token weights; None without token weighting
    history: History

    def curve(self, key: str) -> Curve:
        """Return a training metric; empty if no step has it."""
        return self.train.get(key, Curve(np.empty(0), np.empty(0)))


def parts(curves: Curves, key: str) -> dict[str, Curve]:
    """Return the curves of a metric with several values, by name: `layer_1` of `attention_entropy`."""
    prefix = f"{key}/"
    return {name.removeprefix(prefix): curve for name, curve in curves.items() if name.startswith(prefix)}


def load_run(folder: Path, name: str | None = None) -> Run:
    """Read a run folder; a half-written last line is ignored, and the last record of each step counts.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path}: not found; give the folder that training was started with as --save")
    records = list(read_by_step(path).values())
    if not records:
        raise UserError(f"{path}: holds no complete step, a report needs at least one; train a step first")
    for record in records:
        if record.get("denominator") == 0:
            record |= {"lm_loss": None, "train_loss": None}
    config = folder / "config.yaml"
    return Run(
        name=name if name is not None else folder.resolve().name,
        folder=folder,
        steps=records[-1]["step"] + 1,
        train=_curves(records),
        validation=_curves(read_by_step(folder / EVALUATION_FILE).values()),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        passage=Passage.read(folder) if (folder / PASSAGE_FILE).is_file() else None,
        history=read_history(folder),
    )


def _curves(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in scalars(record):
            points.setdefault(name, []).append((record["step"], value))
    return {name: Curve(*np.array(own, dtype=np.float64).T) for name, own in points.items()}


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several run folders; each is named by its path from the folder that they have in common."""
    if len(folders) == 1:
        return [load_run(folders[0])]
    paths = [folder.resolve() for folder in folders]
    common = os.path.commonpath(paths)
    return [load_run(path, str(path.relative_to(common))) for path in paths]


def stage_folders(run: Path) -> list[Path]:
    """List the stage folders of a run by the recorded time of their first steps; [] for a run without stages."""
    if (run / METRICS_FILE).is_file():
        return []
    started = {}
    for path in run.glob(f"*/{METRICS_FILE}"):
        first = next(iter(read_by_step(path).values()), {"time": math.inf})
        started[path.parent] = first["time"]
    return sorted(started, key=lambda folder: (started[folder], folder.name))


def _at_common_steps(first: Curve, second: Curve) -> tuple[Float64, Float64, Float64]:
    """Return the steps that both curves have, and the values of each at these steps."""
    steps, at_first, at_second = np.intersect1d(first.steps, second.steps, return_indices=True)
    return steps, first.values[at_first], second.values[at_second]


def loss_difference(first: Run, second: Run) -> tuple[float, float] | None:
    """Return the mean and the standard deviation of the training losses of `second` minus those of `first`, in nats.

    Over the last tenth of the steps that both have, at least ten; None if these are fewer than 20. Pairing by step
    removes the variation that both share because they read the same rows in the same order. Steps are correlated, so
    this is no confidence interval.
    """
    steps, base, other = _at_common_steps(first.curve("lm_loss"), second.curve("lm_loss"))
    if len(steps) < 20:
        return None
    last = (other - base)[-max(len(steps) // 10, 10) :]
    return float(np.mean(last)), float(np.std(last, ddof=1))


def stability(losses: npt.ArrayLike, gradient_norms: npt.ArrayLike) -> dict[str, float]:
    """Compute SkyLadder's four stability figures of at least 10 consecutive steps; lower is steadier.

    L_t is the training loss in nats and G_t the gradient norm before clipping, t = 1..n:

        volatility       mean over t >= 10 of Std(L[t-9..t]), the population standard deviation
        smoothness       mean over t >= 2 of |L_t - L_{t-1}|
        loss ratio       mean over t >= 2 of L_t / min(L_1..L_{t-1}); below 1 if the loss falls at every step
        min(norm, 1)     mean of min(G_t, 1)
    """
    loss = np.asarray(losses, dtype=np.float64)
    return {
        "volatility": np.lib.stride_tricks.sliding_window_view(loss, VOLATILITY_SPAN).std(axis=1).mean(),
        "smoothness": np.abs(np.diff(loss)).mean(),
        "loss ratio": (loss[1:] / np.minimum.accumulate(loss)[:-1]).mean(),
        "min(norm, 1)": np.minimum(gradient_norms, 1.0).mean(),
    }


def stability_between(run: Run, first: int, end: int) -> dict[str, float]:
    """Compute the stability figures of steps `first` to `end` - 1, ignoring steps that are not finite.

    Raises:
        UserError: fewer than 10 of these steps are recorded.
    """
    steps, losses, norms = _at_common_steps(run.curve("lm_loss"), run.curve("grad_norm"))
    chosen = (steps >= first) & (steps < end)
    if np.count_nonzero(chosen) < VOLATILITY_SPAN:
        raise UserError(
            f"stability_steps: got {first} {end}, of which {run.folder} has {np.count_nonzero(chosen)} finite steps, "
            f"needs {VOLATILITY_SPAN}; its last step is {run.steps - 1}"
        )
    return stability(losses[chosen], norms[chosen])
