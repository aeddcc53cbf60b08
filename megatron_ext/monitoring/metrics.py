"""Write and read a run's records, and send their numbers to the views.

    metrics.jsonl       each step
    evaluation.jsonl    each validation, and each run of lm-eval
    history.jsonl       each start: when, how, on which machine, and what it loaded; each end: when and how. A killed
                        process writes no end. Lines are never removed: steps that were repeated also cost time.

One line is one JSON object with an integer `step`. JSON has no NaN and no infinity, so non-finite numbers are written
as `null` (the views get the number itself). Only rank 0 writes.
"""

import datetime
import json
import math
import mmap
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.config import LoggingConfig
from megatron_ext.errors import UserError, echo
from megatron_ext.files.atomic import write_whole
from megatron_ext.monitoring.views import Views

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
HISTORY_FILE = "history.jsonl"

Record = Mapping[str, Any]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, in order; an incomplete last line (no newline yet) is skipped.

    Raises:
        UserError: a complete line is not a JSON object with an integer `step`; the message names the file and the line.
        FileNotFoundError: there is no such file.
    """
    return list(_read_lines(path))


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of metrics, in order; none without such a file. Raises UserError for damage."""
    if not path.is_file():
        return
    for record in _read_lines(path):
        for key, value in record.items():
            is_number = type(value) in (float, int) and abs(value) <= 1e308  # most are: half the time of `_is_metric`
            if not (is_number or _is_metric(key, value)):
                got = f"{path}, step {record['step']}: {key}: got {echo(value)}"
                raise UserError(f"{got}, needs a finite number or null; restore the file or delete that line")
        yield record


def read_by_step(path: Path, steps: Collection[int] | None = None) -> dict[int, dict[str, Any]]:
    """Read the last values of each step, or of some steps, by increasing step. Raises as `read_metrics`.

    Several records of a step, such as a validation and lm-eval's results, become one.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_metrics(path):
        if steps is None or record["step"] in steps:
            by_step.setdefault(record["step"], {}).update(record)
    return dict(sorted(by_step.items()))


def _is_metric(key: str, value: Any) -> bool:
    """Return whether a record may have this value: a finite number or null; several for some keys."""
    if isinstance(value, list):
        return key.startswith("attention_") and all(_is_metric("", of_layer) for of_layer in value)
    if isinstance(value, dict):
        known = key in ("source_rows", "lm_eval") or (
            key in ("by_length", "by_position") and all(map(str.isdecimal, value))
        )
        return known and all(_is_metric("", one) for one in value.values())
    if key == "setting":
        return isinstance(value, str)
    return value is None or (isinstance(value, (int, float)) and abs(value) <= 1e308)


def cut_back(path: Path, end_step: float) -> None:
    """Remove the lines at the end of a file whose `step` is `end_step` or more, and an incomplete last line.

    Steps never decrease in a file, so only these lines and the one before them are read, however long the file is. A
    missing file stays missing; kept lines are unchanged, byte for byte. Raises as `read_jsonl` for a corrupt line among
    those that are read; nothing is changed then.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            kept = _end_of_kept(path, content, end_step)
            lacks_newline = kept > 0 and content[kept - 1 : kept] != b"\n"
        file.truncate(kept)
        if lacks_newline:
            file.seek(kept)
            file.write(b"\n")


def _end_of_kept(path: Path, content: mmap.mmap, end_step: float) -> int:
    """Return the number of bytes before the lines that `cut_back` removes."""
    end = len(content)
    while end > 0:
        start = content.rfind(b"\n", 0, end - 1) + 1
        line = content[start:end]
        record = _parse(line)
        if record is None and line.strip() and line.endswith(b"\n"):
            raise _corrupt(path, content[:start].count(b"\n") + 1, line)
        if record is not None and record["step"] < end_step:
            break
        end = start
    return end


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of each complete line."""
    with path.open("rb") as file:  # line by line: the file of a long run may not fit in memory
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is not None:
                yield record
            elif line.strip() and line.endswith(b"\n"):  # an incomplete last line is no error
                raise _corrupt(path, number, line)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, with or without its newline; None if it is no object with an integer step."""
    try:
        record = json.loads(line.decode())
    except ValueError:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and abs(step) < 2**53 else None


def _corrupt(path: Path, number: int, line: bytes) -> UserError:
    text = line[:60].removesuffix(b"\n").decode("utf-8", errors="replace") + ("..." if len(line) > 60 else "")
    return UserError(
        f"{path}, line {number}: got {text!r}, needs one JSON object with an integer step; "
        "restore the file from a copy or delete that line"
    )


def stage_folders(run: Path) -> list[Path]:
    """List the stage folders of a run by the recorded time of their first steps; [] for a run without stages."""
    if (run / METRICS_FILE).is_file():
        return []
    started = {}
    for path in run.glob(f"*/{METRICS_FILE}"):
        first = next(read_metrics(path), {})
        began = first.get("time")
        started[path.parent] = math.inf if began is None else began
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

    def __init__(self, folder: Path | str, *, resume_step: int, logging: LoggingConfig, config: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics, evaluation = self.folder / METRICS_FILE, self.folder / EVALUATION_FILE
        if resume_step:
            cut_back(evaluation, resume_step + 1)
            cut_back(metrics, resume_step)
        mode = "a" if resume_step else "w"
        self._files = {"train": FileIO(metrics, mode), "validation": FileIO(evaluation, mode)}
        self._views = Views(self.folder, logging, config, resume_step)
        # a view hides everything from resume_step on, but the evaluation at that step is still valid
        for record in read_jsonl(evaluation):
            if record["step"] == resume_step:
                self._show("validation", record)

    def write(self, group: str, record: Record) -> None:
        """Write the record of a step ("train"), or of an evaluation ("validation")."""
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        write_whole(self._files[group], line.encode())  # survives a crash of this process, but not a power failure
        self._show(group, record)

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
    if isinstance(value, float):
        return value if math.isfinite(value) else None
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
            value = {} if None in value else {f"layer_{n}": of_layer for n, of_layer in enumerate(value, start=1)}
        if isinstance(value, Mapping):
            yield from ((f"{key}/{name}", number) for name, number in scalars(value))
        elif isinstance(value, (int, float, np.number)) and key != "step":
            yield key, float(value)


@dataclass(frozen=True)
class History:
    """The lines of a run's history."""

    starts: tuple[Record, ...]  # the recorded facts of each start, the oldest first
    end: Record | None  # the end of the newest start; None if the run is still training or was killed

    @property
    def status(self) -> str:
        if not self.starts:
            return "unknown: the folder has no history.jsonl"
        if self.end is None:
            return "no end recorded: it is still training, or was killed"
        return str(self.end.get("how", "ended"))


def note_history(folder: Path, event: str, step: int, facts: Record) -> None:
    """Append a "start", or an "end", after `step` steps to a run's history, with other facts as JSON types.

    Raises as `read_jsonl` does.
    """
    cut_back(folder / HISTORY_FILE, math.inf)  # remove a line left incomplete by a killed process
    with (folder / HISTORY_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, "step": step, "time": local_time(time.time()), **facts}) + "\n")


def read_history(folder: Path) -> History:
    """Read a run's history; it is empty if there is no file. Raises what `read_jsonl` raises."""
    path = folder / HISTORY_FILE
    lines = read_jsonl(path) if path.is_file() else []
    starts = tuple(line for line in lines if line.get("event") == "start")
    return History(starts, lines[-1] if lines and lines[-1].get("event") == "end" else None)


def first_start(folder: Path) -> Record:
    """Return the newest start at step 0 of a run's history; empty if there is none. Raises as `read_jsonl` does."""
    firsts = [start for start in read_history(folder).starts if start["step"] == 0]
    return firsts[-1] if firsts else {}


def local_time(seconds: float) -> str:
    """Return a Unix time as local time with seconds and UTC offset in ISO 8601."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
