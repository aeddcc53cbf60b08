"""Handle signals that ask the process to end: save a checkpoint and exit after the current step.

The exit status of every process, once the checkpoint is complete:

    0     all steps done
    2     bad input, one error line: do not restart
    85    stopped by SIGTERM, SIGUSR1 (Slurm's warning), SIGHUP (the terminal is gone) or another signal but SIGINT,
          saved: run the same command again (REQUEUE)
    86    diverged: a loss (of training or validation) or the gradient norm is not finite, or the loss is a spike
          with --on-spike stop: the same command would diverge again
    87    made no progress (run/watchdog.py): counts as a crash
    130   stopped by SIGINT (a person), saved; or ended by a second one, without saving
    128 + signal   stopped without --save, or by a signal during start-up: nothing is saved
    else  a crash: the newest complete checkpoint is intact

torchrun exits with 1 for any nonzero status of its workers. Therefore process 0 writes `RUN/stopped.json` for status 85
once the checkpoint is complete, and `RUN/diverged.json` for 86, and removes both when a run starts. A launch script
also removes them before it launches, and treats them afterwards as these statuses. torchrun needs `--signals-to-handle`
with SIGUSR1, otherwise that signal kills it and orphans its workers, and a `--shutdown-timeout` that covers a step and
a save (default 30 s, then SIGKILL).
"""

import json
import math
import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.errors import DivergedError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.launch import is_first
from megatron_ext.monitoring.progress import print_above

REQUEUE = 85
DIVERGED = 86
HUNG = 87
STOPPED_FILE = "stopped.json"
DIVERGED_FILE = "diverged.json"

# signals that end nothing, that cannot be caught, that Python makes an OSError, and faults of the process itself
_OTHER = {
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP),
}
REQUESTS = set(signal.Signals) - _OTHER
_ALWAYS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # a shell lets its background commands ignore SIGINT
_INTERRUPT = max(signal.Signals) + 1  # of SIGINT's priority
_TWICE_S = 1.0  # a terminal and a launcher may both pass on one Ctrl-C


class StopRequest(ExitStack):
    """Records the last signal of `REQUESTS` in `signal` (0: none), from `listen` to the end of the context.

    After a SIGINT, no later signal replaces it.

    A thread reads the signals as well, because the main thread may be in a kernel or a collective for minutes: it
    prints at once that the run will stop. A second SIGINT ends this process without saving. A SIGTERM after a SIGINT
    does not: torchrun's workers get one for its second SIGINT, but also for a preemption.

    Signals that are ignored (SIGHUP under nohup) or have a handler (timers) are left alone, except the three that
    launchers send.
    """

    def __init__(self, run: Path | None) -> None:
        super().__init__()
        self.run = run  # folder of the run, if it has one
        self.signal = 0
        self._listens = False

    @property
    def priority(self) -> int:
        """The signal as a number, of which the largest of all processes counts: SIGINT's is above all others."""
        if self.signal == signal.SIGINT:
            return _INTERRUPT
        return self.signal

    def listen(self) -> None:
        """Start recording signals; a second call changes nothing."""
        if self._listens:
            return
        self._listens = True
        reading, writing = os.pipe()
        self.callback(os.close, writing)  # the thread ends
        os.set_blocking(writing, False)
        self.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
        threading.Thread(target=self._read, args=(reading,), name="signals", daemon=True).start()
        for number in REQUESTS:
            before = signal.getsignal(number)
            if number in _ALWAYS or before in (signal.SIG_DFL, signal.default_int_handler):
                self.callback(signal.signal, number, before)
                signal.signal(number, self._record)
        os.register_at_fork(after_in_child=self.close)  # a forked child's signals are its own

    def _record(self, number: int, _: object) -> None:
        if self.signal != signal.SIGINT:  # a person sent it: nothing starts the run again
            self.signal = number

    def _read(self, reading: int) -> None:
        """Acknowledge each signal once, and end the process at a second SIGINT; runs in the thread of `listen`."""
        interrupted_at = math.inf
        acknowledged = set()
        with open(reading, "rb", buffering=0) as numbers:  # Python writes every signal's number, also a timer's
            for byte in iter(partial(numbers.read, 1), b""):
                number = ord(byte)
                if signal.getsignal(number) != self._record:
                    continue
                if number == signal.SIGINT:
                    if time.monotonic() > interrupted_at + _TWICE_S:
                        self._say("ended by a second Ctrl-C, without saving")
                        os._exit(128 + signal.SIGINT)
                    interrupted_at = min(interrupted_at, time.monotonic())
                if number not in acknowledged:
                    acknowledged.add(number)
                    self._acknowledge(signal.Signals(number))

    def _acknowledge(self, number: signal.Signals) -> None:
        text = f"{number.name}: the run saves and stops after the current step"
        if self.run is None:
            text = f"{number.name}: the run stops after the current step, and saves nothing without --save"
        if number == signal.SIGINT:
            text += "; a second Ctrl-C ends it now, without saving"
        self._say(text)

    def _say(self, text: str) -> None:
        if is_first():
            print_above(text)


def signal_of(priority: int) -> int:
    """Return the signal of `StopRequest.priority`."""
    if priority == _INTERRUPT:
        return signal.SIGINT
    return priority


@dataclass(frozen=True)
class Ending:
    """Describes how a run ended."""

    signal: int  # the signal that stopped the run; 0 if all steps are done
    step: int  # number of completed steps
    checkpoint: Path | None  # of this step, None without --save; after divergence, the newest good one, if any
    divergence: DivergedError | None = None  # the error in the step, or the validation, after `step` steps
    spoilt: Path | None = None  # after divergence, the newest checkpoint if it has the weights that diverged

    @property
    def status(self) -> int:
        """The exit status of every process, from the table of this module."""
        if self.divergence is not None:
            return DIVERGED
        if not self.signal:
            return 0
        if self.checkpoint is None or self.signal == signal.SIGINT:
            return 128 + self.signal
        return REQUEUE

    def mark(self, run: Path) -> None:
        """Write RUN/stopped.json if the launcher is to restart, or RUN/diverged.json; atomically."""
        facts: dict[str, Any] = {"exit_code": self.status, "step": self.step}
        if self.divergence is not None:
            name = DIVERGED_FILE
            facts |= {"what": self.divergence.what, "value": str(self.divergence.value), "checkpoint": None}
            if self.checkpoint is not None:
                facts["checkpoint"] = str(self.checkpoint)
        elif self.status == REQUEUE and self.checkpoint is not None:
            name = STOPPED_FILE
            checkpoint = str(self.checkpoint.relative_to(run))
            facts |= {"signal": signal.Signals(self.signal).name, "checkpoint": checkpoint}
        else:
            return
        with atomic_write(run / name) as aside:
            aside.write_text(json.dumps(facts) + "\n")


def unmark(run: Path) -> None:
    """Remove RUN/stopped.json and RUN/diverged.json at the start of a run."""
    for name in (STOPPED_FILE, DIVERGED_FILE):
        (run / name).unlink(missing_ok=True)
