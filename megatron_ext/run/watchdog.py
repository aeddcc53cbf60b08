"""End a process that makes no progress for `--watchdog-timeout` seconds, and write the stacks of its threads.

    stderr                      one line: the rank, its activity, and where the stacks are
    RUN/stacks/rank0.txt        the stacks of all threads; without --save they go to stderr
    RUN/stacks/nccl_0           NCCL's flight recorder; `torchfrtrace RUN/stacks --prefix nccl_` names the rank that
                                did not join a collective

Progress is `heartbeat.beat`. The exit status is HUNG.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from megatron_ext import heartbeat
from megatron_ext.engine import compat
from megatron_ext.run.signals import HUNG

REPORT_S = 10.0  # limit for writing the report: a disk or terminal that hangs must not keep the process alive


class Watchdog:
    """Watches this process's heartbeat inside the context.

    `timeout_s` is the maximum time between two beats (0: unlimited); without a `folder`, stacks go to stderr.
    """

    def __init__(self, rank: int, folder: Path | None, timeout_s: float) -> None:
        self.rank = rank
        self.stacks: Path | None = None
        if folder is not None:
            self.stacks = folder / "stacks"
        self.timeout_s = timeout_s
        self._end = threading.Event()
        self._hangs = False

    def __enter__(self) -> "Watchdog":
        if self.timeout_s:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._hangs:
            threading.Event().wait()  # the watchdog is ending the process: keep the exit status HUNG
        self._end.set()

    def _watch(self) -> None:
        interval_s = min(1.0, self.timeout_s / 4)
        beats = heartbeat.beats
        quiet_s = 0.0
        before = time.monotonic()
        while not self._end.wait(interval_s):
            now = time.monotonic()
            quiet_s += min(now - before, 2 * interval_s)  # a longer gap: the whole process was suspended
            before = now
            if heartbeat.beats != beats or not heartbeat.limited:
                beats = heartbeat.beats
                quiet_s = 0.0
            elif quiet_s > self.timeout_s:
                self._hangs = True
                try:
                    report = threading.Thread(target=self._report, args=(quiet_s,), daemon=True)
                    report.start()
                    report.join(REPORT_S)
                finally:  # also if the report fails
                    os._exit(HUNG)

    def _report(self, quiet_s: float) -> None:
        stacks = self.stacks
        place = "below"
        if stacks is not None:
            place = f"in {stacks}/rank{self.rank}.txt"
        with contextlib.suppress(Exception):
            print(
                f"error: rank {self.rank} made no progress for {quiet_s:.0f} s in {heartbeat.phase} "
                f"(--watchdog-timeout {self.timeout_s:g}); the stacks of its threads are {place}",
                file=sys.stderr,
                flush=True,
            )
        with contextlib.suppress(Exception):
            if stacks is None:
                faulthandler.dump_traceback(all_threads=True)
                return
            stacks.mkdir(parents=True, exist_ok=True)
            with (stacks / f"rank{self.rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            compat.dump_flight_recorder(stacks / f"nccl_{self.rank}")
