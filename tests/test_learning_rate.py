"""The learning rate against its formula."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.config.arguments import parse
from megatron_ext.learning_rate import DecayStyle, LearningRateSchedule

STYLES: list[DecayStyle] = ["constant", "linear", "cosine", "WSD"]


@st.composite
def schedules(draw: st.DrawFn) -> LearningRateSchedule:
    peak = draw(st.floats(1e-6, 1e-2))
    warmup = draw(st.integers(0, 200))
    fall = draw(st.integers(1, 300))
    return LearningRateSchedule(
        peak=peak,
        minimum=peak * draw(st.floats(0, 1)),
        warmup_steps=warmup,
        decay_steps=warmup + fall,
        style=draw(st.sampled_from(STYLES)),
        wsd_steps=draw(st.integers(1, fall)),
        from_zero=draw(st.booleans()),
    )


def wanted(s: LearningRateSchedule, step: int) -> float:
    if step < s.warmup_steps:
        return (step + (not s.from_zero)) * (s.peak / s.warmup_steps)
    remaining_steps = max(s.decay_steps - step, 0)  # steps until the minimum
    if s.style == "constant":
        return s.peak
    if s.style == "WSD":
        return s.minimum + (s.peak - s.minimum) * min(remaining_steps / s.wsd_steps, 1)
    share = remaining_steps / (s.decay_steps - s.warmup_steps)
    rise = share if s.style == "linear" else math.sin(math.pi / 2 * share) ** 2
    return s.minimum + (s.peak - s.minimum) * rise


@given(schedule=schedules(), extra=st.integers(0, 600))
@settings(max_examples=200, deadline=None)
def test_formula(schedule: LearningRateSchedule, extra: int) -> None:
    edges = [schedule.warmup_steps, schedule.decay_steps - schedule.wsd_steps, schedule.decay_steps]
    steps = [0, 1, extra, *(edge + offset for edge in edges for offset in (-1, 0, 1))]
    for step in steps:
        if step >= 0:
            assert schedule.at(step) == pytest.approx(wanted(schedule, step), rel=1e-9, abs=1e-18)


def test_a_warmup_from_zero_lags_a_step_behind() -> None:
    schedule = parse(["--lr", "1", "--lr-warmup-iters", "4", "--lr-warmup-from-zero"]).learning_rate_schedule()
    assert [schedule.at(t) for t in range(5)] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


@given(schedule=schedules(), first=st.integers(0, 300), step=st.integers(0, 300))
def test_a_continued_schedule_goes_on_where_it_was_left(schedule: LearningRateSchedule, first: int, step: int) -> None:
    assert replace(schedule, first_step=first).at(step) == schedule.at(first + step)
