"""Jobs in worker processes, of which few are under way at once, and which end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_end
from types import FrameType
from typing import Protocol, TypeVar

from megatron_ext.errors import UserError

AHEAD = 2  # jobs under way per worker: one at work, one at hand


class Job(Protocol):
    """Does something that leaves its result on disk."""

    def __call__(self) -> None: ...


J = TypeVar("J", bound=Job)


def run_jobs(jobs: Iterable[J], workers: int) -> Generator[J]:
    """Yield each job when it is done, in any order.

    After an error, of a job or of `jobs` itself, no further job begins, but those under way are finished; of several
    errors, the one that comes first in the order of the jobs is raised. On Ctrl-C, or where the iterator is closed,
    the workers end at once.

    Raises:
        UserError: a worker was killed.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that tokenizers' threads hold
    stop, stopper = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (stop,))
    numbered = _numbered(jobs)
    under_way: dict[Future[None], tuple[int, J]] = {}
    failed: dict[int, BaseException] = {}
    try:
        while True:
            while not failed and len(under_way) < AHEAD * workers and (following := next(numbered, None)):
                number, job = following
                if isinstance(job, Exception):
                    failed[number] = job
                    break
                with _without_ctrl_c():
                    under_way[pool.submit(job)] = number, job
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                number, job = under_way.pop(future)
                error = future.exception()
                if error is None:
                    yield job
                else:
                    failed[number] = error
        if failed:  # the same error whichever worker met its own first
            raise failed[min(failed)]
    except (KeyboardInterrupt, GeneratorExit):
        stopper.close()
        raise
    except BrokenProcessPool:
        raise UserError(
            f"workers: one of {workers} was killed, perhaps for memory; pass fewer --workers or a smaller "
            "--max-document-bytes"
        ) from None
    finally:
        with _without_ctrl_c():
            pool.shutdown(cancel_futures=True)
        stopper.close()
        stop.close()


def _numbered(jobs: Iterable[J]) -> Iterator[tuple[int, J | Exception]]:
    """Yield jobs by their number, and at last the error that ended them, if one did."""
    number = -1
    try:
        for number, job in enumerate(jobs):
            yield number, job
    except Exception as error:
        yield number + 1, error


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Keep Ctrl-C from workers that begin here, even while they start: their parent sees it, and stops them.

    The parent sees it at the end of the block. To block the signal is not enough for that: another thread would take
    it, and Python interrupts the main one whichever takes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C interrupts the main thread alone
        return
    came: list[FrameType | None] = []
    handler = signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(signal.SIGINT, came[0])


def _start_worker(stop: Connection) -> None:
    """Make the process a worker: of one core, and ended when its parent ends or closes its end of `stop`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait_for_end([parent.sentinel, stop])
        os._exit(1)  # not sys.exit, which ends this thread alone

    threading.Thread(target=end_with_parent, daemon=True).start()
