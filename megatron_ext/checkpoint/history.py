"""A run's history, RUN/history.jsonl: a line for each start and each end.

A start says when, how, on which machine, and what it loaded; an end when and how. A killed process writes no end. Lines
are never removed: steps that were repeated also cost time.
"""

import datetime
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.files.jsonl import cut_back, read_jsonl

HISTORY_FILE = "history.jsonl"
Record = Mapping[str, Any]


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
    if not path.is_file():
        return History((), None)
    lines = read_jsonl(path)
    starts = tuple(line for line in lines if line.get("event") == "start")
    end = None
    if lines and lines[-1].get("event") == "end":
        end = lines[-1]
    return History(starts, end)


def first_start(folder: Path) -> Record:
    """Return the newest start at step 0 of a run's history; empty if there is none. Raises as `read_jsonl` does."""
    for start in reversed(read_history(folder).starts):
        if start["step"] == 0:
            return start
    return {}


def local_time(seconds: float) -> str:
    """Return a Unix time as local time with seconds and UTC offset in ISO 8601."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
