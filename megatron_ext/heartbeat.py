"""Count this process's progress, from any thread; `run/watchdog.py` ends a process whose count stands still.

Whatever takes long and moves on calls `beat`: each step, each batch of validation, each tensor written to or read from
a checkpoint.
"""

from __future__ import annotations

beats = 0
phase = "start-up"


def beat(doing: str | None = None) -> None:
    """Note progress, and if given what begins now, such as "step 41"."""
    global beats, phase
    beats += 1
    if doing is not None:
        phase = doing
