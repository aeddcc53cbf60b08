"""Reads a finished, running or killed run back from its folder: its curves, and the numbers of its summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError
from megatron_ext.inspect.passage import PASSAGE_FILE, Passage, read_passage
from megatron_ext.monitoring.history import History, read_history
from megatron_ext.monitoring.metrics import EVALUATION_FILE, METRICS_FILE, damaged, read_by_step, recorded_number
from megatron_ext.monitoring.stability import VOLATILITY_SPAN, Stability, stability

CONFIG_FILE = "config.yaml"
LOSSES = ("lm_loss", "train_loss")
WEIGHTING = ("weight_std", "weight_max", "zero_share", "score_mean")  # of a step with token weighting

Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Holds values [n] at increasing steps [n]; NaN where a value was not finite."""

    steps: Column
    values: Column

    def finite(self) -> Curve:
        """Return the points whose value is finite."""
        known = np.isfinite(self.values)
        return Curve(self.steps[known], self.values[known])


@dataclass(frozen=True)
class Run:
    """Holds what a run folder says about its run."""

    name: str
    folder: Path
    records: tuple[Mapping[str, Any], ...]  # one per optimizer step, by increasing step; never empty
    evaluations: tuple[Mapping[str, Any], ...]  # one per evaluated step, by increasing step; may be empty
    config: str  # text of config.yaml; empty if there is none
    passage: Passage | None  # tokens as weighted last; only of a run with token weighting
    passage_note: str  # why there is a passage.json but no `passage`; else empty
    history: History  # when and where it was started, how it ended

    @property
    def weighted(self) -> bool:
        """Whether any step holds a number of token weighting."""
        return any(self.curve(key).finite().values.size for key in WEIGHTING)

    def curve(self, key: str) -> Curve:
        """Return a training metric at every step; NaN where a record lacks it, a loss where no token was trained."""
        nothing = [key in LOSSES and record.get("denominator") == 0 for record in self.records]
        values = [None if none else record.get(key) for record, none in zip(self.records, nothing, strict=True)]
        return self._curve(self.records, values, METRICS_FILE, key)

    def validation(self) -> Curve:
        """Return the validation loss in nats; `steps` counts completed steps, so its 0 is before training."""
        losses = [record.get("valid_loss") for record in self.evaluations]
        return self._curve(self.evaluations, losses, EVALUATION_FILE, "valid_loss")

    def validation_by_length(self) -> dict[int, Curve]:
        """Return the validation loss at each evaluation length in tokens, shortest first."""
        by_length = [self._by_number(record, "by_length") for record in self.evaluations]
        lengths = sorted({length for losses in by_length for length in losses})
        return {
            length: self._curve(
                self.evaluations, [losses.get(length) for losses in by_length], EVALUATION_FILE, "by_length"
            )
            for length in lengths
        }

    def final_by_length(self) -> dict[int, float]:
        """Return the last finite validation loss at each evaluation length."""
        known = {length: curve.finite().values for length, curve in self.validation_by_length().items()}
        return {length: float(values[-1]) for length, values in known.items() if values.size}

    def by_layer(self, key: str) -> tuple[Column, npt.NDArray[np.float64]]:
        """Return a metric that some steps have for each layer: their steps [n] and its values [n, layers]."""
        known = [record for record in self.records if record.get(key)]
        for record in known:
            layers = record[key]
            if not isinstance(layers, list) or len(layers) != len(known[0][key]):
                raise self._damaged(METRICS_FILE, record, key, layers, "a number for each layer")
        values = [[self._number(value, METRICS_FILE, record, key) for value in record[key]] for record in known]
        return np.array([record["step"] for record in known], dtype=np.float64), np.array(values, dtype=np.float64)

    def losses_by_position(self) -> dict[int, dict[int, float]]:
        """Return the validation loss in nats by the tokens that a token sees, at each evaluation that recorded it.

        A key p stands for the tokens that see at least p ones, themselves included, and fewer than 2p.
        """
        found = {record["step"]: self._by_number(record, "by_position") for record in self.evaluations}
        return {step: losses for step, losses in found.items() if losses}

    def clock(self, name: str) -> Column | None:
        """Return what has been spent at the end of each recorded step: consumed_tokens, flops or hours in steps.

        None where a record does not tell, or the first steps are missing.
        """
        key = {"consumed_tokens": "consumed_tokens", "flops": "flops", "hours": "step_time_s"}[name]
        values = self.curve(key).values
        if not np.isfinite(values).all():
            return None
        if name == "consumed_tokens":
            return values
        if self.records[0]["step"] != 0:
            return None
        return np.cumsum(values) / (3600.0 if name == "hours" else 1.0)

    def _curve(self, records: Sequence[Mapping[str, Any]], values: Sequence[Any], file: str, key: str) -> Curve:
        pairs = zip(records, values, strict=True)
        numbers = [self._number(value, file, record, key) for record, value in pairs]
        steps = np.array([record["step"] for record in records], dtype=np.float64)
        return Curve(steps, np.array(numbers, dtype=np.float64))

    def _by_number(self, record: Mapping[str, Any], key: str) -> dict[int, float]:
        """Read a mapping of an evaluation whose keys are numbers of tokens."""
        given = record.get(key) or {}
        if not isinstance(given, Mapping) or not all(name.isdecimal() and len(name) < 16 for name in given):
            raise self._damaged(EVALUATION_FILE, record, key, given, "a mapping from numbers of tokens to losses")
        return {int(name): self._number(loss, EVALUATION_FILE, record, key) for name, loss in given.items()}

    def _number(self, value: Any, file: str, record: Mapping[str, Any], key: str) -> float:
        """Return a recorded number; NaN where it was not finite."""
        number = recorded_number(self.folder / file, record, key, value)
        return math.nan if number is None else number

    def _damaged(self, file: str, record: Mapping[str, Any], key: str, value: Any, needs: str) -> UserError:
        return damaged(self.folder / file, record, key, value, needs)

    def evaluation_terms(self) -> set[tuple[bool, int | None]]:
        """Return what its validations looked at: whether inside documents, and the stride of windows that slide."""
        strides = [(record, record["stride"]) for record in self.evaluations if "stride" in record]
        return {
            (bool(record.get("document_mask")), stride if isinstance(stride, int) else None)
            for record, stride in strides
        }


@dataclass(frozen=True)
class PairedDifferences:
    """Holds how the training losses of two runs differ at the same steps, by span of steps.

    Attributes:
        steps: [n], the middle of each span.
        means: [n], nats: of the second run less the first.
        half_widths: [n], of the 95 % interval of each mean, steps taken as independent of each other.
        last_tenth: mean and half width over the last tenth of the steps.
    """

    steps: Column
    means: Column
    half_widths: Column
    last_tenth: tuple[float, float]

    @property
    def significant(self) -> npt.NDArray[np.bool_]:
        """Say of each span, [n], whether the interval of its mean leaves out 0."""
        return np.abs(self.means) > self.half_widths


def paired_differences(first: Run, second: Run) -> PairedDifferences | None:
    """Compare the training losses of two runs step by step; None where fewer than 20 steps are in both.

    Runs that read the same rows in the same order differ less at a step than two steps of one run do: that is why steps
    are paired.
    """
    losses = []
    for run in (first, second):
        known = run.curve("lm_loss").finite()
        losses.append(dict(zip(known.steps, known.values, strict=True)))
    common = np.array(sorted(losses[0].keys() & losses[1].keys()))
    if common.size < 20:
        return None
    difference = np.array([losses[1][step] - losses[0][step] for step in common])
    spans = np.array_split(np.arange(common.size), min(30, common.size // 5))
    found = [_mean_and_half_width(difference[span]) for span in spans]
    return PairedDifferences(
        steps=np.array([common[span].mean() for span in spans]),
        means=np.array([mean for mean, _ in found]),
        half_widths=np.array([width for _, width in found]),
        last_tenth=_mean_and_half_width(difference[-max(common.size // 10, 10) :]),
    )


def _mean_and_half_width(values: Column) -> tuple[float, float]:
    return float(values.mean()), float(_t_975(values.size - 1) * values.std(ddof=1) / np.sqrt(values.size))


def _t_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for 4 degrees of freedom and more, to 0.3 %.

    Abramowitz and Stegun, 26.7.5: powers of 1/freedom beside the normal distribution's quantile z.
    """
    z = 1.959964
    powers = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(power / freedom**n for n, power in enumerate(powers, start=1))


def unlike_evaluations(runs: Sequence[Run]) -> str | None:
    """Say in a line that the runs' validation losses cannot be compared; None where they can, as far as is known."""
    terms = {term: run.name for run in runs for term in run.evaluation_terms()}
    if len(terms) < 2:
        return None
    said = [
        f"{name} {'inside' if inside else 'across'} documents, in {f'windows that slide by {by}' if by else 'blocks'}"
        for (inside, by), name in terms.items()
    ]
    return f"validation losses are not of the same terms: {'; '.join(said)}; evaluate them alike"


@dataclass(frozen=True)
class Weighting:
    """Holds the numbers of token weighting in the last step that has them; None where none has."""

    weight_std: float | None
    weight_max: float | None
    zero_share: float | None  # of the tokens, 0..1
    score_mean: float | None
    seconds: float  # scoring, over all steps


@dataclass(frozen=True)
class Summary:
    """Holds a run's numbers; None where the run has no such number."""

    first_step: int
    completed_steps: int
    missing_steps: int  # between the first and the last recorded one
    non_finite_steps: int  # loss or gradient norm NaN or infinite; left out of `stability`, as steps without tokens are
    spikes: int  # steps whose loss was one (monitoring/spikes.py)
    skipped_steps: int  # that changed no weight
    tokens: float | None
    seconds: float  # in optimizer steps; evaluations, checkpoints and start-up not counted
    data_wait_seconds: float
    save_stall_seconds: float
    flops: float | None  # of all recorded steps
    mfu: float | None  # median, 0..1
    time_saved: float | None  # share of the time that the same steps would have taken at the last window
    flops_saved: float | None  # the same of FLOPs
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

    A damaged `passage.json` is left out and noted: it shows one moment, the report shows the run.

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
    records = read_by_step(path)
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
        evaluations=read_by_step(evaluation) if evaluation.is_file() else (),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        passage=passage,
        passage_note=note,
        history=read_history(folder),
    )


def stage_folders(run: Path) -> list[Path]:
    """List the folders of a run in stages, in the order in which they were trained; [] for a run without stages."""
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
    first, last = itemgetter(0), itemgetter(-1)
    steps = run.curve("step").steps
    losses, norms = run.curve("lm_loss").values, run.curve("grad_norm").values
    finite = np.isfinite(losses) & np.isfinite(norms)
    trained = run.curve("denominator").values != 0
    validation = run.validation().finite()
    points = list(zip(validation.steps.astype(int).tolist(), validation.values.tolist(), strict=True))
    weighting = None
    if run.weighted:
        seconds = float(np.nansum(run.curve("score_time_s").values))
        weighting = Weighting(**{key: _reduced(run, key, last) for key in WEIGHTING}, seconds=seconds)
    return Summary(
        first_step=int(steps[0]),
        completed_steps=int(steps[-1]) + 1,
        missing_steps=int(steps[-1] - steps[0]) + 1 - len(steps),
        non_finite_steps=int(np.count_nonzero(~finite & trained)),
        spikes=int(np.nansum(run.curve("spike").values)),
        skipped_steps=int(np.nansum(run.curve("skipped").values)),
        tokens=_reduced(run, "consumed_tokens", last),
        seconds=float(np.nansum(run.curve("step_time_s").values)),
        data_wait_seconds=float(np.nansum(run.curve("data_wait_s").values)),
        save_stall_seconds=float(np.nansum(run.curve("save_stall_s").values)),
        flops=_reduced(run, "flops", np.sum),
        mfu=_reduced(run, "mfu", np.median),
        time_saved=_saved(run, "step_time_s"),
        flops_saved=_saved(run, "flops"),
        median_tokens_per_s=_reduced(run, "tokens_per_s", np.median),
        peak_memory_bytes=_reduced(run, "peak_memory_bytes", np.max),
        window_start=_reduced(run, "window", first),
        window_end=_reduced(run, "window", last),
        initial_train_loss=_reduced(run, "lm_loss", first),
        final_train_loss=_reduced(run, "lm_loss", last),
        initial_validation=points[0] if points else None,
        final_validation=points[-1] if points else None,
        best_validation=min(points, key=lambda point: point[1]) if points else None,
        stability=stability(losses[finite], norms[finite]),
        weighting=weighting,
    )


def _saved(run: Run, key: str) -> float | None:
    """Hold what all steps took against as many of the median step at the last window, where ten steps had that."""
    windows, spent = run.curve("window").values, run.curve(key).values
    last = (windows == windows[-1]) & np.isfinite(spent)
    if last.sum() < 10 or not np.isfinite(spent).all():
        return None
    # a first step also compiles and warms up, whatever its window; it counts as any step of its run
    return float(1.0 - spent.sum() / (np.median(spent[last]) * spent.size))


def stability_between(run: Run, first: int, end: int) -> Stability:
    """Compute the four stability figures of steps `first` to `end` - 1; steps that are not finite are left out.

    Raises:
        UserError: too few of these steps are recorded for the volatility, which is over spans of 10.
    """
    losses, norms = run.curve("lm_loss"), run.curve("grad_norm").values
    chosen = (losses.steps >= first) & (losses.steps < end) & np.isfinite(losses.values) & np.isfinite(norms)
    if np.count_nonzero(chosen) < VOLATILITY_SPAN:
        raise UserError(
            f"stability_steps: got {first} {end}, of which {run.folder} has {np.count_nonzero(chosen)} finite steps, "
            f"needs {VOLATILITY_SPAN}; its steps are {int(losses.steps[0])} to {int(losses.steps[-1])}"
        )
    return stability(losses.values[chosen], norms[chosen])


def _reduced(run: Run, key: str, reduce: Callable[[Column], Any]) -> float | None:
    """Reduce the finite values of a training metric to one number; None where there is none."""
    values = run.curve(key).finite().values
    return float(reduce(values)) if values.size else None
