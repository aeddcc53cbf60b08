"""Write and read a run's records, and send their numbers to the views.

    metrics.jsonl       each step
    evaluation.jsonl    each validation, and each run of lm-eval

One line is one JSON object with an integer `step`. JSON has no NaN and no infinity, so non-finite numbers are written
as `null` (the views get the number itself). Only rank 0 writes.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config import LoggingConfig
from megatron_ext.errors import UserError, echo
from megatron_ext.files.atomic import write_whole
from megatron_ext.files.jsonl import cut_back, iterate_jsonl, read_jsonl
from megatron_ext.files.reading import JsonObject
from megatron_ext.monitoring.views import Views

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
_LARGEST = 1e308

Record = Mapping[str, Any]


def read_metrics(path: Path) -> Iterator[JsonObject]:
    """Yield the records of a file of metrics, in order; none without such a file. Raises UserError for damage."""
    if not path.is_file():
        return
    for record in iterate_jsonl(path):
        if not (is_flat(record) and _are_finite(record.values())):
            for key, value in record.items():
                if not _is_metric(key, value):
                    got = f"{path}, step {record['step']}: {key}: got {echo(value)}"
                    raise UserError(f"{got}, needs a finite number or null; restore the file or delete that line")
        yield record


def is_flat(record: Record) -> bool:
    """Return whether all values of a record are numbers, as in most records of a step."""
    return {*map(type, record.values())} <= {int, float}


def _are_finite(numbers: Collection[float]) -> bool:
    """Return whether no number is infinite or NaN. It may be False for finite numbers whose sum is not finite."""
    return min(numbers) >= -_LARGEST and max(numbers) <= _LARGEST and math.isfinite(sum(numbers))


def read_by_step(path: Path, steps: Collection[int] | None = None) -> dict[int, JsonObject]:
    """Read the last values of each step, or of some steps, by increasing step. Raises as `read_metrics`.

    Several records of a step, such as a validation and lm-eval's results, become one.
    """
    by_step: dict[int, JsonObject] = {}
    for record in read_metrics(path):
        if steps is None or record["step"] in steps:
            by_step.setdefault(record["step"], {}).update(record)
    return dict(sorted(by_step.items()))


def _is_metric(key: str, value: Any) -> bool:
    """Return whether a record may have this value: a finite number or null; several for some keys."""
    if isinstance(value, list):
        return key.startswith("attention_") and _are_metrics(value)
    if isinstance(value, dict):
        if key in ("by_length", "by_position"):
            return all(map(str.isdecimal, value)) and _are_metrics(value.values())
        return key in ("source_rows", "lm_eval") and _are_metrics(value.values())
    if key == "setting":
        return isinstance(value, str)
    return value is None or (isinstance(value, (int, float)) and abs(value) <= _LARGEST)


def _are_metrics(values: Iterable[Any]) -> bool:
    return all(_is_metric("", value) for value in values)


def stage_folders(run: Path) -> list[Path]:
    """List the stage folders of a run by the recorded time of their first steps; [] for a run without stages.

    Stages without a step are left out, unless all are.
    """
    if (run / METRICS_FILE).is_file():
        return []
    first_records = {path.parent: next(read_metrics(path), None) for path in run.glob(f"*/{METRICS_FILE}")}
    started = {folder: record.get("time", math.inf) for folder, record in first_records.items() if record is not None}
    if not started:
        return sorted(first_records)
    return sorted(started, key=lambda folder: (started[folder], folder.name))


class MetricsWriter:
    """Appends the record of each step and evaluation; each line is flushed to the system before the call returns.

    On construction the files are cut back to `resume_step` completed steps, so each step appears once however often the
    run was killed: `metrics.jsonl` keeps step < resume_step (`step` is the 0-based t), `evaluation.jsonl` keeps
    step <= resume_step (`step` counts completed steps). At resume_step 0, a new run, both are emptied without being
    read. The run folder is created if missing. `logging` selects the views, some of which show the `config`.

    Raises:
        UserError: a corrupt line in a file.
    """

    def __init__(self, folder: Path | str, *, resume_step: int, logging: LoggingConfig, config: JsonObject) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = self.folder / METRICS_FILE
        evaluation = self.folder / EVALUATION_FILE
        mode = "w"
        if resume_step:
            mode = "a"
            cut_back(evaluation, resume_step + 1)
            cut_back(metrics, resume_step)
        self._files = {"train": FileIO(metrics, mode), "validation": FileIO(evaluation, mode)}
        self._views = Views(self.folder, logging, config, resume_step)
        # a view hides everything from resume_step on, but the evaluation at that step is still valid
        for record in read_jsonl(evaluation):
            if record["step"] == resume_step:
                self._show("validation", record)

    def write(self, group: str, record: Record) -> None:
        """Write the record of a step ("train"), or of an evaluation ("validation")."""
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        write_whole(self._files[group], line.encode())  # survives a crash of this process
        self._show(group, record)

    def sync(self) -> None:
        """Wait until both files are on disk, so that they survive a power failure."""
        for file in self._files.values():
            os.fsync(file)

    def close(self) -> None:
        """Close every file and view."""
        for file in self._files.values():
            file.close()
        self._views.close()

    def _show(self, group: str, record: Record) -> None:
        named = {f"{group}/{name}": value for name, value in scalars(record)}
        self._views.show(group, record["step"], named)


def _plain(value: Any) -> Any:
    """Convert `value` to JSON types: numpy scalars to Python numbers, non-finite floats to None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record, except its step, with their names.

    A nested mapping adds a level, `by_length/512`, and so does a list, which has a number for each layer:
    `attention_entropy/layer_1`. A null has no number, and a list with a null none at all.
    """
    for key, value in record.items():
        if type(value) is float:
            yield key, value
            continue
        if isinstance(value, (list, tuple)):
            if None in value:
                continue
            value = {f"layer_{layer}": number for layer, number in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            yield from ((f"{key}/{name}", number) for name, number in scalars(value))
        elif isinstance(value, (int, float, np.number)) and key != "step":
            yield key, float(value)
