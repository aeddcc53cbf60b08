"""Handle SIGTERM, SIGUSR1 and SIGINT: save a checkpoint and exit after the current step.

The exit status of every process, once the checkpoint is complete:

    0     all steps done
    2     bad input, one error line: do not restart
    85    stopped by SIGTERM or SIGUSR1 (Slurm's warning), saved: run the same command again (REQUEUE)
    86    diverged: a loss (of training or validation) or the gradient norm is not finite, or the loss is a spike
          with --on-spike stop: the same command would diverge again
    87    made no progress (run/watchdog.py): counts as a crash
    130   stopped by SIGINT (a person), saved
    128 + signal   stopped without --save, or by a signal during start-up: nothing is saved
    else  a crash: the newest complete checkpoint is intact

torchrun exits with 1 for any nonzero status of its workers. Therefore process 0 writes `RUN/stopped.json` for status 85
once the checkpoint is complete, and `RUN/diverged.json` for 86, and removes both when a run starts. A launch script
also removes them before it launches, and treats them afterwards as these statuses. torchrun needs `--signals-to-handle`
with SIGUSR1, otherwise that signal kills it and orphans its workers, and a `--shutdown-timeout` that covers a step and
a save (default 30 s, then SIGKILL).
"""

import json
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_ext.errors import DivergedError
from megatron_ext.files.atomic import atomic_write

REQUEUE, DIVERGED, HUNG = 85, 86, 87
STOPPED, DIVERGED_FILE = "stopped.json", "diverged.json"
VALIDATION_LOSS = "validation loss"


class StopRequest(ExitStack):
    """Records the last signal in `signal` (0: none), from `listen` to the end of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.signal = 0

    def listen(self) -> None:
        """Start recording signals; a second call changes nothing."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            before = signal.signal(number, self._note)
            self.callback(signal.signal, number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


@dataclass(frozen=True)
class Ending:
    """Describes how a run ended."""

    signal: int  # that stopped it; 0 if all steps are done
    step: int  # completed steps
    checkpoint: Path | None  # of this step, None without --save; after divergence, the newest one, if any
    divergence: DivergedError | None = None  # what ended it in the step, or the validation, after `step` steps

    @property
    def status(self) -> int:
        """The exit status of every process, as above."""
        if self.divergence is not None:
            return DIVERGED
        if not self.signal:
            return 0
        return REQUEUE if self.checkpoint is not None and self.signal != signal.SIGINT else 128 + self.signal

    def mark(self, run: Path) -> None:
        """Write RUN/stopped.json if the launcher is to restart, or RUN/diverged.json; atomically."""
        facts: dict[str, Any] = {"exit_code": self.status, "step": self.step}
        if self.divergence is not None:
            name, checkpoint = DIVERGED_FILE, None if self.checkpoint is None else str(self.checkpoint)
            facts |= {"what": self.divergence.what, "value": str(self.divergence.value), "checkpoint": checkpoint}
        elif self.status == REQUEUE and self.checkpoint is not None:
            name, checkpoint = STOPPED, str(self.checkpoint.relative_to(run))
            facts |= {"signal": signal.Signals(self.signal).name, "checkpoint": checkpoint}
        else:
            return
        with atomic_write(run / name) as aside:
            aside.write_text(json.dumps(facts) + "\n")


def unmark(run: Path) -> None:
    """Remove RUN/stopped.json and RUN/diverged.json at the start of a run."""
    for name in (STOPPED, DIVERGED_FILE):
        (run / name).unlink(missing_ok=True)
