"""Read and write `history.jsonl`: when, how and on which machine a run was started, and how it ended.

There is one line per start and one per end. A killed process writes no end, so a start without an end is a run that
is still training or was killed. Lines are never removed: steps that were repeated also cost time.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.monitoring.metrics import cut_back, read_jsonl

HISTORY_FILE = "history.jsonl"


@dataclass(frozen=True)
class History:
    """The lines of a run's history."""

    starts: tuple[Mapping[str, Any], ...]  # the recorded facts of each start, the oldest first
    end: Mapping[str, Any] | None  # of the newest start; None if it is still training or was killed

    @property
    def status(self) -> str:
        """Return the status of the run as text."""
        if not self.starts:
            return "unknown: the folder has no history.jsonl"
        if self.end is None:
            return "no end recorded: it is still training, or was killed"
        return str(self.end.get("how", "ended"))


def note_start(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Append a start after `step` steps to a run's history, with other facts, as JSON types.

    Raises:
        UserError: a complete line of the file is not a JSON object.
    """
    cut_back(folder / HISTORY_FILE, lambda _: True)  # remove a line left incomplete by a killed process
    _append(folder, {"event": "start", "step": step, "time": now()} | dict(facts))


def note_end(folder: Path, step: int, how: str) -> None:
    """Append the end of the newest start, after `step` steps of the run."""
    _append(folder, {"event": "end", "step": step, "time": now(), "how": how})


def read_history(folder: Path) -> History:
    """Read a run's history; it is empty if there is no file.

    Raises:
        UserError: a complete line of the file is not a JSON object.
    """
    path = folder / HISTORY_FILE
    lines = read_jsonl(path) if path.is_file() else []
    starts = tuple(line for line in lines if line.get("event") == "start")
    return History(starts, lines[-1] if lines and lines[-1].get("event") == "end" else None)


def now() -> str:
    """Return the local time with seconds and UTC offset in ISO 8601."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _append(folder: Path, line: Mapping[str, Any]) -> None:
    with (folder / HISTORY_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
