"""A finished, running or killed run read back from its folder: its curves, and what they sum up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError
from megatron_ext.inspect.passage import PASSAGE_FILE, Passage, read_passage
from megatron_ext.monitoring.metrics import EVALUATION_FILE, METRICS_FILE, read_jsonl
from megatron_ext.monitoring.stability import Stability, stability

CONFIG_FILE = "config.yaml"
WEIGHTING = ("weight_std", "weight_max", "zero_share", "score_mean")  # of a step with token weighting

Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values [n] at increasing steps [n]; NaN where a value was not finite."""

    steps: Column
    values: Column

    def finite(self) -> Curve:
        known = np.isfinite(self.values)
        return Curve(self.steps[known], self.values[known])


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    records: tuple[Mapping[str, Any], ...]  # one per optimizer step, by increasing step; never empty
    evaluations: tuple[Mapping[str, Any], ...]  # one per evaluated step, by increasing step; may be empty
    config: str  # text of config.yaml; empty if there is none
    passage: Passage | None  # tokens as weighted last; only of a run with token weighting
    passage_note: str  # why there is a passage.json but no `passage`; else empty

    @property
    def weighted(self) -> bool:
        """Whether token weighting has left a number in any step."""
        return any(self.curve(key).finite().values.size for key in WEIGHTING)

    def curve(self, key: str) -> Curve:
        """A training metric at every step; NaN where a record lacks it."""
        return _curve(self.records, [record.get(key) for record in self.records])

    def validation(self) -> Curve:
        """Validation loss in nats; `steps` counts completed steps, so its 0 is before training."""
        return _curve(self.evaluations, [record.get("valid_loss") for record in self.evaluations])

    def validation_by_length(self) -> dict[int, Curve]:
        """Validation loss at each evaluation length, shortest first; lengths in tokens."""
        lengths = sorted({int(length) for record in self.evaluations for length in record.get("by_length") or {}})
        return {length: self._validation_at(length) for length in lengths}

    def _validation_at(self, length: int) -> Curve:
        values = [(record.get("by_length") or {}).get(str(length)) for record in self.evaluations]
        return _curve(self.evaluations, values)


@dataclass(frozen=True)
class Weighting:
    """Token weighting in numbers: those of the last step that has them; None where none has."""

    weight_std: float | None
    weight_max: float | None
    zero_share: float | None  # of the tokens, 0..1
    score_mean: float | None
    seconds: float  # scoring, over all steps


@dataclass(frozen=True)
class Summary:
    """A run in numbers; None where the run has no such number."""

    first_step: int
    completed_steps: int
    missing_steps: int  # between the first and the last recorded one
    non_finite_steps: int  # loss or gradient norm NaN or infinite; left out of `stability`
    tokens: float | None
    seconds: float  # in optimizer steps; evaluations, checkpoints and start-up not counted
    median_tokens_per_s: float | None
    peak_memory_bytes: float | None
    window_start: float | None
    window_end: float | None
    initial_train_loss: float | None
    final_train_loss: float | None
    initial_validation: tuple[int, float] | None  # (completed steps, nats)
    final_validation: tuple[int, float] | None
    best_validation: tuple[int, float] | None
    stability: Stability
    weighting: Weighting | None  # of a run with token weighting


def load_run(folder: Path | str, name: str | None = None) -> Run:
    """Read a run folder; a killed writer's half-written line is left out, each step's last record counts.

    A damaged `passage.json` is left out and noted: it tells of one moment, the report of the run.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt, or a record has no integer `step`.
    """
    folder = Path(folder)
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(
            f"{path}: not found, a report needs a run folder with metrics.jsonl; "
            "give the folder that training was started with as --save"
        )
    records = _by_step(path)
    if not records:
        raise UserError(f"{path}: holds no complete step, a report needs at least one; train a step first")
    evaluation = folder / EVALUATION_FILE
    config = folder / CONFIG_FILE
    passage, note = None, ""
    if (folder / PASSAGE_FILE).is_file():
        try:
            passage = read_passage(folder)
        except UserError as error:
            note = str(error)
    return Run(
        name=name if name is not None else folder.resolve().name,
        folder=folder,
        records=records,
        evaluations=_by_step(evaluation) if evaluation.is_file() else (),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        passage=passage,
        passage_note=note,
    )


def stage_folders(run: Path) -> list[Path]:
    """The folders of a run in stages, in the order in which they were trained; [] of a run without."""
    if (run / METRICS_FILE).is_file():
        return []
    metrics = sorted(run.glob(f"*/{METRICS_FILE}"), key=lambda path: path.stat().st_mtime)
    return [path.parent for path in metrics]


def load_runs(folders: Sequence[Path | str]) -> list[Run]:
    """Read several run folders, each named by the shortest end of its path that tells all of them apart.

    Raises:
        UserError: the same folder twice, or what `load_run` raises.
    """
    paths = [Path(folder).resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"{path}: given twice, a comparison needs different run folders; name each once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [load_run(path, "/".join(path.parts[-depth:])) for path in paths]


def summarise(run: Run) -> Summary:
    """Reduce a run to the numbers of a report's table."""
    steps = run.curve("step").steps
    losses, norms = run.curve("lm_loss").values, run.curve("grad_norm").values
    finite = np.isfinite(losses) & np.isfinite(norms)
    validation = run.validation().finite()
    points = list(zip(validation.steps.astype(int).tolist(), validation.values.tolist(), strict=True))
    return Summary(
        first_step=int(steps[0]),
        completed_steps=int(steps[-1]) + 1,
        missing_steps=int(steps[-1] - steps[0]) + 1 - len(steps),
        non_finite_steps=int(np.count_nonzero(~finite)),
        tokens=_last(run.curve("consumed_tokens")),
        seconds=float(np.nansum(run.curve("step_time_s").values)),
        median_tokens_per_s=_median(run.curve("tokens_per_s")),
        peak_memory_bytes=_largest(run.curve("peak_memory_bytes")),
        window_start=_first(run.curve("window")),
        window_end=_last(run.curve("window")),
        initial_train_loss=_first(run.curve("lm_loss")),
        final_train_loss=_last(run.curve("lm_loss")),
        initial_validation=points[0] if points else None,
        final_validation=points[-1] if points else None,
        best_validation=min(points, key=lambda point: point[1]) if points else None,
        stability=stability(losses[finite], norms[finite]),
        weighting=_weighting(run) if run.weighted else None,
    )


def _weighting(run: Run) -> Weighting:
    last = {key: _last(run.curve(key)) for key in WEIGHTING}
    return Weighting(**last, seconds=float(np.nansum(run.curve("score_time_s").values)))


def _by_step(path: Path) -> tuple[Mapping[str, Any], ...]:
    latest: dict[int, Mapping[str, Any]] = {}
    for record in read_jsonl(path):
        step = record.get("step")
        if isinstance(step, bool) or not isinstance(step, int):
            raise UserError(f"{path}: a record's `step` is {step!r}, needs an integer; delete or restore its line")
        latest[step] = record
    return tuple(latest[step] for step in sorted(latest))


def _curve(records: Sequence[Mapping[str, Any]], values: Sequence[Any]) -> Curve:
    numbers = [float("nan") if value is None else float(value) for value in values]
    steps = np.array([record["step"] for record in records], dtype=np.float64)
    return Curve(steps, np.array(numbers, dtype=np.float64))


def _first(curve: Curve) -> float | None:
    values = curve.finite().values
    return float(values[0]) if values.size else None


def _last(curve: Curve) -> float | None:
    values = curve.finite().values
    return float(values[-1]) if values.size else None


def _median(curve: Curve) -> float | None:
    values = curve.finite().values
    return float(np.median(values)) if values.size else None


def _largest(curve: Curve) -> float | None:
    values = curve.finite().values
    return float(values.max()) if values.size else None
