"""Notices that this rank hangs or has lost another one, says in a line which rank is to blame, and ends the process.

    the main thread    beats:    "step 41", "saving after 41 steps", "validating after 41 steps", ...
    the watch          a thread: no beat for too long -> a line, the stacks of all threads in a file, exit status HUNG
    the reports        a thread renews every second or so, in the store where the processes met, what its rank does
    the roll call      one process reads all reports twice, some seconds apart, and names the rank that the others lack

Most ranks of a run that stands still are not to blame: they wait in a collective. The one that does not is; where all
of them renew their reports but one, that one has been killed or stopped, or its node is gone. Only time in which the
watch itself runs counts, so that a job that Slurm suspends has not hung when it goes on.

faulthandler's timer, which needs no second thread, knows neither steps nor ranks and ends every process with 1; torch's
own watchdog (NCCL's) knows its collectives, and takes the rank that waits for the one that hangs.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, TypeVar

import torch.distributed as dist

from megatron_ext.errors import UserError, first_line, printable
from megatron_ext.launch import report_to_torchrun
from megatron_ext.run.signals import HUNG

Answer = TypeVar("Answer")
Standing = Literal["waits", "device", "busy", "lost", "failed"]
RENEW_S, RANKS_PER_S = 1.0, 1000  # of reports: at most so many a second reach the store
STORE_S = 5  # in which the store answers, or is lost
PATIENCE = 4  # renewals that a rank may miss before it counts as lost; a busy machine makes some late
_TORCH = str(Path(dist.__file__).parents[1])
_PACKAGE = str(Path(__file__).resolve().parents[1])
_MOST_NAMED, _MOST_SAID = 4, 200


@dataclass(frozen=True)
class Report:
    """Says what a rank does.

    Attributes:
        renewed: how often it has said so.
        doing: what its main thread has begun: "step 41".
        standing: it waits in a collective, waits for its device, is busy with something else, has lost another rank,
            or has failed.
        where: in words.
        seconds: since `doing` began.
    """

    renewed: int
    doing: str
    standing: Standing
    where: str
    seconds: float

    @property
    def ended(self) -> bool:
        """Whether it renews its reports no more, and has said so."""
        return self.standing in ("lost", "failed")


class LostRankError(RuntimeError):
    """Says which rank is lost, that this one cannot go on without.

    Attributes:
        said: another process says so.
    """

    def __init__(self, text: str, *, said: bool) -> None:
        super().__init__(text)
        self.said = said


class Watchdog:
    """Watches the main thread that made it, inside the context.

    Args:
        rank, world_size: this process's.
        folder: for the stacks; None: the system's folder for temporary files.
        timeout_s: the longest time between two beats; 0: any.
        environment: where the processes have met, as a launcher says it.
    """

    def __init__(
        self, rank: int, world_size: int, folder: Path | None, timeout_s: float, environment: Mapping[str, str]
    ) -> None:
        self.rank, self.world_size, self.folder, self.timeout_s = rank, world_size, folder, timeout_s
        self.every_s = max(RENEW_S, world_size / RANKS_PER_S)
        if timeout_s:
            self.every_s = min(self.every_s, timeout_s / 4)
        self._place = environment
        self._main = threading.get_ident()
        self._begun: tuple[int, str] = (0, "the start")  # beats, and what the last one began
        self._quiet_s = 0.0
        self._renewed = 0
        self._lock = threading.Lock()  # of what reports are numbered by
        self._last_words = False
        self._end = threading.Event()
        self._hangs = False
        self._store: dist.Store | None = None

    def beat(self, doing: str) -> None:
        """Note that the main thread goes on, and with what."""
        self._begun = (self._begun[0] + 1, doing)

    def __enter__(self) -> Watchdog:
        if self.world_size > 1:
            self._store = within(2 * STORE_S, self._open_store)
            self._renew()
            threading.Thread(target=self._renew_all_the_time, name="reports", daemon=True).start()
        if self.timeout_s:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the watch; an error that another rank's end has caused becomes the one that says which.

        Raises:
            LostRankError: instead of what a collective has raised.
        """
        if self._hangs:
            threading.Event().wait()  # the watch has begun to end the process: by what the first rank to end broke
        self._end.set()
        if error is None or self.world_size == 1:
            return
        if not lost_contact(error):
            what = first_line(error)
            name = type(error).__name__
            self._leave("failed", what if isinstance(error, UserError) or what == name else f"{name}: {what}")
            return
        self._leave("lost", "has lost another rank")
        said = self._call_the_roll()
        raise LostRankError(said or "another process says which rank is lost", said=not said) from error

    def _watch(self) -> None:
        beats, before = self._begun[0], time.monotonic()
        while not self._end.wait(self.every_s):
            now = time.monotonic()
            self._quiet_s += min(now - before, 2 * self.every_s)  # more has passed only where this thread was stopped
            before = now
            if self._begun[0] != beats:
                beats, self._quiet_s = self._begun[0], 0.0
            elif self._quiet_s > self.timeout_s:
                self._hangs = True
                self._give_up()

    def _give_up(self) -> None:
        """Say that this rank hangs and, on one of them, which one is to blame; end the process."""
        mine = self._report()
        stacks = within(10, self._write_stacks) or "its stacks could not be written"
        own = (
            f"rank {self.rank} has not got on for {self._quiet_s:.0f} s in {mine.doing} "
            f"(--watchdog-timeout {self.timeout_s:g}): it {mine.where}; {stacks}"
        )
        self._say(own)
        blames = ""
        if self.world_size > 1:
            began = time.monotonic()
            blames = self._call_the_roll()
            if blames:
                self._say(blames)
                _tell_torchrun(blames)  # before the others leave theirs: the first is taken for the cause
            # the others say their lines and are counted before this one's end breaks their collectives
            time.sleep(max(0.0, 2 * PATIENCE * self.every_s - (time.monotonic() - began)))
        if not blames:
            _tell_torchrun(own)
        os._exit(HUNG)

    def _say(self, text: str) -> None:
        print(f"error: {printable(text)}", file=sys.stderr, flush=True)

    def _write_stacks(self) -> str:
        if self.folder is None:
            descriptor, name = tempfile.mkstemp(prefix=f"stacks-rank{self.rank}-", suffix=".txt")
            os.close(descriptor)
            path = Path(name)
        else:
            path = self.folder / "stacks" / f"rank{self.rank}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return f"the stacks of its threads are in {path}"

    def _report(self) -> Report:
        frames = sys._current_frames()
        standing, where = whereabouts(frames.pop(self._main), frames.values())
        return Report(self._renewed, self._begun[1], standing, where, round(self._quiet_s, 1))

    def _open_store(self) -> dist.Store:
        """Connect to where the processes have met: the clients of torch's own groups are locked while they wait."""
        place = self._place
        store = dist.TCPStore(
            place["MASTER_ADDR"], int(place["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=STORE_S)
        )
        return dist.PrefixStore(f"watchdog/{place.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def _renew_all_the_time(self) -> None:
        while not self._end.wait(self.every_s):
            self._renew()

    def _renew(self) -> None:
        with self._lock:
            if not self._last_words:
                self._renewed += 1
                self._set(self._report())

    def _leave(self, standing: Standing, where: str) -> None:
        """Leave a last report."""

        def leave() -> None:
            with self._lock:
                self._last_words = True
                self._set(Report(self._renewed + 1, self._begun[1], standing, where[:_MOST_SAID], 0.0))

        within(5, leave)

    def _set(self, report: Report) -> None:
        if self._store is not None:
            try:
                self._store.set(str(self.rank), json.dumps(asdict(report)))
            except (dist.DistError, RuntimeError):
                self._store = None  # its process has ended

    def _call_the_roll(self) -> str:
        """Name the ranks to blame, on the one process that asks first; "" on the others."""
        said = within(STORE_S + 2 * PATIENCE * self.every_s, self._blame)
        return self._no_store() if said is None else said

    def _blame(self) -> str:
        store = self._open_store()
        if store.add("called", 1) > 1:
            return ""
        before = self._read(store)
        if any(report is not None and report.standing == "failed" for report in before.values()):
            return name_blamed(before, before)
        time.sleep(PATIENCE * self.every_s)
        return name_blamed(before, self._read(store))

    def _read(self, store: dist.Store) -> dict[int, Report | None]:
        there = [rank for rank in range(self.world_size) if store.check([str(rank)])]
        texts = store.multi_get([str(rank) for rank in there])
        found = {rank: Report(**json.loads(text)) for rank, text in zip(there, texts, strict=True)}
        return {rank: found.get(rank) for rank in range(self.world_size)}

    def _no_store(self) -> str:
        place = f"{self._place['MASTER_ADDR']}:{self._place['MASTER_PORT']}"
        holder = "torchrun" if self._place.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        return f"rank {self.rank} has lost {holder}: it no longer answers at {place}; look at what became of it"


def _tell_torchrun(line: str) -> None:
    """Leave a line to torchrun, unless the disk does not answer."""
    within(STORE_S, lambda: report_to_torchrun(printable(line)))


def within(seconds: float, action: Callable[[], Answer]) -> Answer | None:
    """Return what `action` does, in a thread of its own; None where it fails, or is not done in time.

    A store or a disk that does not answer blocks for ever.
    """
    answers: list[Answer] = []

    def act() -> None:
        try:
            answers.append(action())
        except (dist.DistError, RuntimeError, OSError):
            return

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def lost_contact(error: BaseException) -> bool:
    """Tell whether a collective has raised an error because another rank is gone, or does not come."""
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return True
    return error.__cause__ is not None and lost_contact(error.__cause__)


def whereabouts(main: FrameType, others: Iterable[FrameType]) -> tuple[Standing, str]:
    """Tell what a process does, by the stacks of its threads: the backward pass of CUDA has one of its own."""
    for innermost in (main, *others):
        collective = _collective(innermost)
        if collective is not None:
            return "waits", f"waits for others in {collective} ({_ours(innermost)})"
    ours = _ours(main)
    if main.f_code.co_name == "synchronize" or "engine/transfer.py" in ours:
        return "device", f"waits for its device ({ours})"
    return "busy", f"is busy in {ours}"


def _collective(innermost: FrameType) -> str | None:
    """Name the collective that a thread is in; None where it is in none."""
    name: str | None = None
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename == dist.distributed_c10d.__file__:
            name = frame.f_code.co_name  # the outermost: what the caller has called
        frame = frame.f_back
    if name is None and ".wait()" in linecache.getline(innermost.f_code.co_filename, innermost.f_lineno):
        return "a collective begun before"
    return name


def _ours(innermost: FrameType) -> str:
    """Name the innermost line of this package on a stack; else the innermost of all."""
    frame: FrameType | None = innermost
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and path != __file__:
            return f"{os.path.relpath(path, os.path.dirname(_PACKAGE))}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno} {innermost.f_code.co_name}"


def name_blamed(before: Mapping[int, Report | None], after: Mapping[int, Report | None]) -> str:
    """Name the ranks that a run stands still for, in a line.

    Args:
        before, after: each rank's report, read twice so far apart that all are renewed between; None: it has none.
    """
    failed = {rank: one for rank, one in after.items() if one is not None and one.standing == "failed"}
    if failed:
        rank, one = next(iter(failed.items()))
        return f"lost {_named(failed)}, which ended in {one.doing}: {one.where}"
    silent = [
        rank
        for rank, one in after.items()
        if one is None or (not one.ended and before[rank] is not None and one.renewed == before[rank].renewed)  # type: ignore[union-attr]
    ]
    if silent:
        last = after[silent[0]]
        since = "it has never reported" if last is None else f"its last report is of {last.doing}"
        return f"lost {_named(silent)}: killed or stopped, or its node is gone; {since}"
    here = {rank: one for rank, one in after.items() if one is not None and not one.ended}
    if not here:
        return "a connection between ranks broke, and all of them have noticed; look at the network"
    for standing in ("busy", "device"):
        blamed = {rank: one for rank, one in here.items() if one.standing == standing}
        if blamed:
            rank = max(blamed, key=lambda rank: blamed[rank].seconds)
            one = blamed[rank]
            also = f"; so do {_named([other for other in blamed if other != rank])}" if len(blamed) > 1 else ""
            return f"rank {rank} holds up the others: in {one.doing} it {one.where}{also}"
    places = {one.where: f"rank {rank} {one.where} in {one.doing}" for rank, one in here.items()}
    return "no rank is busy, each waits for the others: " + "; ".join(list(places.values())[:_MOST_NAMED])


def _named(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"
