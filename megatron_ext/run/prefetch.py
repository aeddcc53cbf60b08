"""The batches of the next step, made while this one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Prefetch(Generic[Made]):
    """Makes steps in one thread, one step ahead.

        take(7)     gives what make(7) gave, and has make(8) begun

    What a step needs is a function of its number alone, so that it does not matter who asked when.

    Args:
        make: called with a step number, in another thread; one call at a time.
        last: make is not called for this step or any later.
    """

    def __init__(self, make: Callable[[int], Made], last: int) -> None:
        self._make, self._last = make, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: dict[int, Future[Made]] = {}

    def take(self, step: int) -> Made:
        """Return what was made for the step; raises what `make` raised."""
        ahead = self._ahead.pop(step, None)
        made = ahead.result() if ahead is not None else self._thread.submit(self._make, step).result()
        if step + 1 < self._last:
            self._ahead[step + 1] = self._thread.submit(self._make, step + 1)
        return made

    def __enter__(self) -> Prefetch[Made]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
