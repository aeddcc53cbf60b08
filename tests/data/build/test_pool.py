"""Jobs in processes: all done, the first error told, no more begun after it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher import wait_until

from megatron_ext.data.build.pool import AHEAD, _without_ctrl_c, run_jobs
from megatron_ext.errors import UserError


@dataclass(frozen=True)
class Touch:
    """Leaves a file that tells the process; fails if asked to, after a while."""

    folder: Path
    number: int
    fails_after: float | None = None

    def __call__(self) -> None:
        if self.fails_after is not None:
            time.sleep(self.fails_after)
            raise UserError(f"job {self.number}")
        (self.folder / str(self.number)).write_text(str(os.getpid()))


def test_every_job_is_done_in_other_processes(tmp_path: Path) -> None:
    jobs = [Touch(tmp_path, number) for number in range(20)]
    assert sorted(job.number for job in run_jobs(jobs, 2)) == list(range(20))
    pids = {path.read_text() for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 20
    assert str(os.getpid()) not in pids
    assert 1 <= len(pids) <= 2


def test_the_first_error_in_order_is_raised_and_nothing_more_begins(tmp_path: Path) -> None:
    drawn = 0

    def jobs() -> Iterator[Touch]:
        nonlocal drawn
        for number in range(100):
            drawn += 1
            yield Touch(tmp_path, number, {3: 0.5, 4: 0.0}.get(number))

    done = []
    with pytest.raises(UserError, match=r"^job 3$"):
        done += [job.number for job in run_jobs(jobs(), 2)]
    assert drawn <= 5 + 2 * AHEAD * 2
    assert {"0", "1", "2"} <= {path.name for path in tmp_path.iterdir()}


def test_an_error_between_jobs_waits_for_those_before_it(tmp_path: Path) -> None:
    def jobs(*fails_after: float | None) -> Iterator[Touch]:
        yield from (Touch(tmp_path, number, fails) for number, fails in enumerate(fails_after))
        raise UserError("no more jobs")

    with pytest.raises(UserError, match="no more jobs"):
        list(run_jobs(jobs(None, None, None), 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    with pytest.raises(UserError, match="job 1"):
        list(run_jobs(jobs(None, 0.3), 2))


@dataclass(frozen=True)
class Wait:
    """Leaves a file and sleeps for ten minutes, unless it is number 0."""

    folder: Path
    number: int

    def __call__(self) -> None:
        (self.folder / str(self.number)).write_text(str(os.getpid()))
        time.sleep(600 if self.number else 0)


def test_workers_end_with_the_iterator(tmp_path: Path) -> None:
    with closing(run_jobs([Wait(tmp_path, number) for number in range(9)], 2)) as done:
        assert next(done).number == 0
        assert wait_until(lambda: sum(bool(path.read_text()) for path in tmp_path.iterdir()) >= 3, 60)
        began = time.monotonic()
    assert time.monotonic() - began < 120
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.fixture
def listening() -> Iterator[None]:
    """Ctrl-C interrupts, also where these tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_workers_start_is_told_later(listening: None) -> None:
    """Whatever thread takes the signal: this one's is blocked, another's is not."""
    idle = threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    inside = False
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
            with _without_ctrl_c():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
                inside = True
    finally:
        idle.set()
    assert inside
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_no_jobs() -> None:
    assert list(run_jobs(iter([]), 2)) == []
