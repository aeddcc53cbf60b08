"""Count the progress of this process, from any thread.

`run/watchdog.py` ends a process whose count stops increasing. Long operations call `beat` as they advance: each step,
each validation batch, each tensor written to or read from a checkpoint.
"""

beats = 0
phase = "start-up"


def beat(doing: str | None = None) -> None:
    """Record progress, and optionally the activity that starts now, such as "step 41"."""
    global beats, phase
    beats += 1
    if doing is not None:
        phase = doing
