"""Every schedule against its formula, restated here in exact fractions or with another arrangement of floats."""

import math
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.schedule import ScheduleKind, WindowSchedule, build_schedule

RAMPS = ("linear", "stepwise", "sinusoidal", "exponential", "cosine", "logarithmic", "long_to_short")


def linear(t: int, start: int, rate: Fraction) -> int:
    return start + math.floor(rate * t)


def smooth(kind: str, t: int, start: int, end: int, ramp: float) -> float:
    share = t / ramp
    rise = end - start
    ratio = math.log(end) - math.log(start)
    if kind == "sinusoidal":
        return start + rise * math.cos(math.pi / 2 * (1 - share))
    if kind == "cosine":
        return start + rise * 2 * math.sin(math.pi / 4 * share) ** 2
    if kind == "exponential":
        return math.exp(math.log(start) + share * ratio)
    assert kind == "logarithmic"
    return math.exp(math.log(start) + math.log(1 + t) / math.log(1 + ramp) * ratio)


def possible_windows(kind: str, t: int, start: int, end: int, rate: Fraction, **options: Any) -> set[int]:
    """The window by the formula; two values where floats cannot tell on which side of an integer it lies."""
    ramp = Fraction(end - start) / rate
    ramps = {"cyclic_jump": options.get("cycles", 1), "cyclic_gradual": 2 * options.get("cycles", 0.5)}.get(kind, 1)
    if kind == "continual":
        return {start if t < options["switch_step"] else end}
    if kind == "constant" or t >= ramp * Fraction(ramps):
        return {end}
    if kind == "linear":
        value = Fraction(linear(t, start, rate))
    elif kind == "long_to_short":
        value = Fraction(end + start - linear(t, start, rate))
    elif kind == "stepwise":
        unit = options["round_to"]
        value = Fraction(unit * (linear(t, start, rate) // unit))
    elif kind == "cyclic_jump":
        value = Fraction(start + math.floor(rate * (t % ramp)))
    elif kind == "cyclic_gradual":
        done = t % (2 * ramp)
        value = start + rate * (done if done <= ramp else 2 * ramp - done)
    else:
        about = smooth(kind, t, start, end, float(ramp))
        near = {math.floor(about * (1 - 1e-9)), math.floor(about * (1 + 1e-9))}
        return {min(max(window, start), end) for window in near}
    return {min(max(math.floor(value), start), end)}


# of few binary digits, which are exact floats; of few decimal ones, and fractions of small numbers, which are not
RATES = st.builds(Fraction, st.integers(1, 640), st.sampled_from([1, 2, 3, 7, 8, 10, 12, 64, 100, 999, 1000, 1024]))


@st.composite
def ramps(draw: st.DrawFn) -> tuple[int, int, Fraction]:
    start = draw(st.integers(1, 300))
    return start, start + draw(st.integers(0, 5000)), draw(RATES)


@pytest.mark.parametrize("kind", [kind.value for kind in ScheduleKind])
@given(ramp=ramps(), share=st.floats(0, 1.2), round_to=st.integers(1, 2000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_formula(kind: str, ramp: tuple[int, int, Fraction], share: float, round_to: int, data: st.DataObject) -> None:
    start, end, rate = ramp
    cycles = data.draw(st.integers(1, 5)) - (0.5 if kind == "cyclic_gradual" else 0)
    switch = data.draw(st.integers(0, 1000))
    schedule = build_schedule(
        kind, start=start, end=end, rate=float(rate), round_to=round_to, cycles=cycles, switch_step=switch
    )
    last = schedule.expansion_steps
    for step in (0, 1, max(last - 1, 0), last, last + 1, 10 * last + 7, int(share * last)):
        window = schedule.window_at(step)
        options = {"switch_step": switch, "round_to": round_to, "cycles": cycles}
        assert window in possible_windows(kind, step, start, end, rate, **options), (schedule, step)
        assert type(window) is int
        assert start <= window <= end
    if kind in RAMPS:
        assert schedule.expansion_steps == math.ceil(Fraction(end - start) / rate)


@pytest.mark.parametrize("kind", [kind.value for kind in ScheduleKind])
@given(ramp=ramps(), cycles=st.integers(1, 4), round_to=st.integers(1, 99), aligned=st.booleans(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_runs_are_those_of_the_single_steps(
    kind: str, ramp: tuple[int, int, Fraction], cycles: int, round_to: int, aligned: bool, data: st.DataObject
) -> None:
    aligned = aligned and kind == "stepwise"
    start, end, rate = (8, 64, ramp[2]) if aligned else (min(ramp[0], 64), min(ramp[1], 90), ramp[2])
    turns = {"cycles": cycles - (0.5 if kind == "cyclic_gradual" else 0), "switch_step": cycles}
    schedule = build_schedule(kind, start=start, end=end, rate=float(rate), round_to=round_to, aligned=aligned, **turns)
    first = data.draw(st.integers(0, 300))
    for last in (first, first + 1, first + data.draw(st.integers(2, 400))):
        windows = [schedule.window_at(step) for step in range(first, last)]
        assert list(schedule.runs(first, last)) == [
            (window, len([*equal_windows])) for window, equal_windows in groupby(windows)
        ]


@pytest.mark.parametrize("kind", [kind.value for kind in ScheduleKind])
@pytest.mark.parametrize("fraction", [1e-6, 0.64, 1])
def test_long_runs_evaluate_few_steps(kind: str, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is twice the logarithm of a run's length, for each of at most 1000 windows on each of 3 ramps."""
    steps = 10**9
    evaluate = WindowSchedule.window_at
    evaluations = Counter[int]()

    def window_at(self: WindowSchedule, step: int) -> int:
        evaluations[step] += 1
        return evaluate(self, step)

    monkeypatch.setattr(WindowSchedule, "window_at", window_at)
    cycles = 1.5 if kind == "cyclic_gradual" else 3
    shape = {"expansion_fraction": fraction / 3, "total_steps": steps, "cycles": cycles, "round_to": 7}
    schedule = build_schedule(kind, start=24, end=1024, switch_step=int(fraction * steps), **shape)
    assert sum(count for _, count in schedule.runs(0, steps)) == steps
    assert evaluations.total() <= 3 * 1001 * 2 * 31


@given(
    kind=st.sampled_from(["linear", "stepwise", "long_to_short", "cyclic_jump"]),
    digits=st.decimals("0.0001", 99, places=4),
    step=st.integers(0, 10**12),
)
@example(kind="linear", digits=Decimal("0.29"), step=100)
@example(kind="cyclic_jump", digits=Decimal("0.29"), step=100)
@settings(max_examples=300, deadline=None)
def test_a_decimal_rate_is_exact_at_any_step(kind: str, digits: Decimal, step: int) -> None:
    end = 10**9
    schedule = build_schedule(kind, start=1, end=end, rate=float(digits), round_to=7, cycles=10**6)
    with localcontext(prec=60):
        gained = int(digits * step % (end - 1) if kind == "cyclic_jump" else digits * step)
        ended = digits * step >= (end - 1) * (10**6 if kind == "cyclic_jump" else 1)
    window = {"stepwise": max((1 + gained) // 7 * 7, 1), "long_to_short": end - gained}.get(kind, 1 + gained)
    assert schedule.window_at(step) == (end if ended else window)


@given(percent=st.integers(1, 100), total=st.integers(1, 10**6), share=st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_a_decimal_expansion_fraction_is_exact(percent: int, total: int, share: float) -> None:
    schedule = build_schedule("linear", start=32, end=8192, expansion_fraction=percent / 100, total_steps=total)
    assert schedule.expansion_steps == -(-percent * total // 100)
    assert schedule.window_at(schedule.expansion_steps) == 8192
    step = int(share * (schedule.expansion_steps - 1))
    assert schedule.window_at(step) == 32 + 8160 * 100 * step // (percent * total)


def test_the_defaults_are_the_papers() -> None:
    assert build_schedule(end=8192) == build_schedule("linear", start=32, end=8192, rate=0.125)
    assert build_schedule("stepwise", end=8192).round_to == 1024
    half = build_schedule("cyclic_gradual", start=32, end=8192, rate=3)
    assert half == build_schedule("cyclic_gradual", start=32, end=8192, rate=3, cycles=0.5)
    ramp = build_schedule("linear", start=32, end=8192, rate=3)
    assert [half.window_at(t) for t in range(0, 3000, 7)] == [ramp.window_at(t) for t in range(0, 3000, 7)]


def test_doublings_of_an_exponential_ramp_are_whole() -> None:
    """A window of 255 would cut a row of 32K into 128 blocks and a rest."""
    schedule = build_schedule("exponential", start=32, end=32_768, expansion_fraction=0.6, total_steps=1000)
    assert [schedule.window_at(60 * k) for k in range(11)] == [32 * 2**k for k in range(11)]
    assert build_schedule("cosine", start=32, end=8192, expansion_fraction=0.6, total_steps=1000).window_at(400) == 4112


@given(odd=st.sampled_from([1, 3, 5, 7, 9]), low=st.integers(0, 5), doublings=st.integers(0, 8), rate=RATES)
@settings(max_examples=100, deadline=None)
def test_aligned_is_the_largest_fraction_up_to_linear(odd: int, low: int, doublings: int, rate: Fraction) -> None:
    start = odd << low
    end = start << doublings
    schedule = build_schedule("stepwise", start=start, end=end, rate=float(rate), aligned=True)
    fractions = [start << k for k in range(doublings + 1)]
    for step in range(0, schedule.expansion_steps + 2, max(schedule.expansion_steps // 50, 1)):
        reached = min(linear(step, start, rate), end)
        wanted = end if step >= schedule.expansion_steps else max(f for f in fractions if f <= reached)
        assert schedule.window_at(step) == wanted


@pytest.mark.parametrize(("start", "end", "near"), [(32, 8191, 8191), (48, 8192, 32), (32, 3000, 375), (32, 320, 20)])
def test_aligned_wants_a_start_that_halving_the_end_gives(start: int, end: int, near: int) -> None:
    message = rf"^window_start: got {start}, window_aligned needs window_end {end} / 2\^k; use {near}$"
    with pytest.raises(UserError, match=message):
        build_schedule("stepwise", start=start, end=end, rate=1, aligned=True)
    assert build_schedule("stepwise", start=near, end=end, rate=1, aligned=True).window_at(0) == near


FRACTION = {"expansion_fraction": 0.5, "total_steps": 9}


@pytest.mark.parametrize(
    ("bad", "text", "good"),
    [
        ({"kind": "linaer"}, "window_schedule: got 'linaer', needs one of constant,", {"kind": "linear"}),
        ({"start": 0}, "window_start: got 0, needs 1..64", {"start": 1}),
        ({"start": 65}, "window_start: got 65, needs 1..64", {"start": 64}),
        ({"rate": 0}, "window_rate: got 0, needs a finite number > 0", {"rate": 1e-9}),
        ({"rate": math.nan}, "window_rate: got nan", {"rate": 1}),
        ({"rate": 1e-310}, "window_rate: got 1e-310", {"rate": 1}),
        ({"rate": 0.5, **FRACTION}, "window_rate: got 0.5 beside window_expansion_fraction 0.5; ", FRACTION),
        ({**FRACTION, "expansion_fraction": 0}, "window_expansion_fraction: got 0, needs (0, 1]", FRACTION),
        ({**FRACTION, "expansion_fraction": 1.001}, "window_expansion_fraction: got 1.001", FRACTION),
        ({**FRACTION, "total_steps": None}, "total_steps: got None, window_expansion_fraction needs it ", FRACTION),
        ({"kind": "stepwise", "round_to": 0}, "window_round_to: got 0, needs >= 1", {"round_to": 1}),
        ({"kind": "continual"}, "window_switch_step: got None", {"kind": "continual", "switch_step": 0}),
        ({"kind": "cyclic_jump", "cycles": 1.5}, "window_cycles: got 1.5, cyclic_jump needs 1, 2, 3, ", {"cycles": 2}),
        ({"kind": "cyclic_gradual", "cycles": 2}, "window_cycles: got 2, cyclic_gradual needs 0.5, 1.5,", {}),
    ],
)
def test_refusals(bad: dict[str, Any], text: str, good: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        build_schedule(**{"end": 64, **bad}).window_at(0)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert 1 <= build_schedule(**{"end": 64, **good}).window_at(0) <= 64
    with pytest.raises(ValueError, match=r"^step: got -1, needs >= 0"):
        build_schedule("linear", end=64).window_at(-1)
