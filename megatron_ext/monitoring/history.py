"""When a run was started, how and on what, and how it ended: `history.jsonl`, a line for each start and for each end.

A killed process writes no end, so a start without one means a run that still trains or was killed. Nothing is ever
taken out of this file: a step that was done twice was paid twice.
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
    """Holds the lines of a run's history.

    Attributes:
        starts: what each start noted, the oldest first.
        end: what the newest start has noted at its end; None while it trains, or where it was killed.
    """

    starts: tuple[Mapping[str, Any], ...]
    end: Mapping[str, Any] | None

    @property
    def status(self) -> str:
        """How the run stands, in words."""
        if not self.starts:
            return "unknown: the folder has no history.jsonl"
        if self.end is None:
            return "no end noted: it still trains, or was killed"
        return str(self.end.get("how", "ended"))


def note_start(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Add a start to a run's history.

    Args:
        folder: of the run.
        step: completed steps.
        facts: what is worth knowing of it, as JSON takes it.

    Raises:
        UserError: a complete line of the file is no JSON object.
    """
    cut_back(folder / HISTORY_FILE, lambda _: True)  # a line that a killed process has half written
    _append(folder, {"event": "start", "step": step, "time": now()} | dict(facts))


def note_end(folder: Path, step: int, how: str) -> None:
    """Add the end of the newest start, after `step` steps of the run."""
    _append(folder, {"event": "end", "step": step, "time": now(), "how": how})


def read_history(folder: Path) -> History:
    """Read a run's history; one without is empty.

    Raises:
        UserError: a complete line of the file is no JSON object.
    """
    path = folder / HISTORY_FILE
    lines = read_jsonl(path) if path.is_file() else []
    starts = tuple(line for line in lines if line.get("event") == "start")
    return History(starts, lines[-1] if lines and lines[-1].get("event") == "end" else None)


def now() -> str:
    """Return the time, with seconds and the offset of this machine's zone, as ISO 8601 has it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _append(folder: Path, line: Mapping[str, Any]) -> None:
    with (folder / HISTORY_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
