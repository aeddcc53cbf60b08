"""Count the progress of this process, from any thread.

`run/watchdog.py` ends a process whose count stops increasing. Long operations call `beat` as they advance: each layer
of a step in both passes, each validation batch, each tensor written to or read from a checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager

beats = 0
phase = "start-up"
limited = True  # whether the time between two beats is limited


def beat(doing: str | None = None) -> None:
    """Record progress, and optionally the activity that starts now, such as "step 41"."""
    global beats, phase
    beats += 1
    if doing is not None:
        phase = doing


@contextmanager
def limit(on: bool) -> Iterator[None]:
    """Limit the time between two beats in the context, or not: for code that cannot call `beat`."""
    global limited
    before = limited
    limited = on
    try:
        yield
    finally:
        limited = before
