"""Circular garbage of old age does not pile up beside all that a process holds."""

from __future__ import annotations

import gc
import weakref
from collections import deque

import pytest

from megatron_ext.run.garbage import only_new_garbage

HELD = [[number] for number in range(600_000)]  # as many objects as libraries and a model are
LIVE = 5_000  # circles in use at a time: they grow old, as what the last checkpoint's writer holds does


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def most_alive(made: int) -> int:
    """Make circles, of which the last ones are in use; return how many were there at most."""
    in_use: deque[Circle] = deque(maxlen=LIVE)
    there: weakref.WeakSet[Circle] = weakref.WeakSet()
    most = 0
    for number in range(made):
        one = Circle()
        in_use.append(one)
        there.add(one)
        if number % 1_000 == 0:
            most = max(most, len(there))
    return most


@pytest.fixture(autouse=True)
def _collected() -> None:
    gc.collect()


def test_circles_do_not_pile_up() -> None:
    with only_new_garbage():
        assert most_alive(200_000) < 100_000
    assert most_alive(200_000) > 100_000  # without it; where this fails, it is no longer needed


def test_nothing_is_left_out_afterwards() -> None:
    circle = Circle()
    gone = weakref.ref(circle)

    def fail() -> None:
        with only_new_garbage():
            assert gc.get_freeze_count() > len(HELD)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    del circle
    gc.collect()
    assert gc.get_freeze_count() == 0
    assert gone() is None
