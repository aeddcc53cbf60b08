"""Steps are made one ahead, in order, in another thread; errors arrive where the step is taken."""

from __future__ import annotations

import threading

import pytest

from megatron_ext.run.prefetch import Prefetch


def test_the_next_step_is_made_while_this_one_is_used() -> None:
    made, next_is_made = [], threading.Event()

    def make(step: int) -> tuple[int, int]:
        made.append(step)
        if step == 4:
            next_is_made.set()
        return step, threading.get_ident()

    with Prefetch(make, last=6) as prefetch:
        step, thread = prefetch.take(3)
        assert next_is_made.wait(10)  # without being asked for
        assert (step, made) == (3, [3, 4])
        assert thread != threading.get_ident()
        assert [prefetch.take(step)[0] for step in (4, 5)] == [4, 5]
    assert made == [3, 4, 5]  # nothing beyond the last


def test_steps_out_of_order_are_made_when_asked_for() -> None:
    with Prefetch(lambda step: step * step, last=100) as prefetch:
        assert [prefetch.take(step) for step in (7, 3, 4, 4, 90)] == [49, 9, 16, 16, 8100]


def test_an_error_arrives_with_its_step() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise ValueError("step 1 has no rows")
        return step

    with Prefetch(make, last=3) as prefetch:
        assert prefetch.take(0) == 0
        with pytest.raises(ValueError, match="no rows"):
            prefetch.take(1)
