"""Goodput against closed forms: no failures, Daly's expected time, Young's interval; and no second is lost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_ext.planning.simulation.failures import (
    Outcome,
    Saves,
    enough_draws,
    intervals_around,
    run_through,
    young,
)

STEPS = np.random.default_rng(5).uniform(8.0, 12.0, 5_000)
HOUR = 3600.0
SYNCHRONOUS = Saves(stall=60.0, write=60.0)


def run(interval: int = 50, saves: Saves = SYNCHRONOUS, mtbf: float = HOUR, seed: int = 1) -> Outcome:
    return run_through(STEPS, interval, saves, mtbf=mtbf, restart=600.0, seed=seed, draws=1)


def test_without_failures_saves_alone_cost_time() -> None:
    outcome = run(50, mtbf=math.inf)
    assert outcome.failures == outcome.redone == outcome.restarting == 0
    assert outcome.saving == pytest.approx(100 * 60.0)
    assert outcome.goodput == pytest.approx(1 - outcome.saving / outcome.seconds)
    assert outcome.seconds == pytest.approx(STEPS.sum() + 100 * 60.0)


@pytest.mark.parametrize("saves", [SYNCHRONOUS, Saves(stall=2.0, write=300.0), Saves(stall=2.0, write=5_000.0)])
def test_every_second_is_accounted_for(saves: Saves) -> None:
    outcome = run(saves=saves, mtbf=HOUR)
    assert outcome.failures > 5
    parts = outcome.progress + outcome.saving + outcome.redone + outcome.restarting
    assert outcome.seconds == pytest.approx(parts)
    assert outcome.progress == pytest.approx(STEPS.sum())


def test_the_same_seed_gives_the_same_run() -> None:
    assert run(seed=3) == run(seed=3) != run(seed=4)


@pytest.mark.parametrize(("interval", "mtbf"), [(20, 3 * HOUR), (60, 3 * HOUR), (200, 3 * HOUR), (30, 0.5 * HOUR)])
def test_the_mean_time_is_dalys(interval: int, mtbf: float) -> None:
    """Daly (2006), equation 20: M e^(R/M) (e^((tau + d)/M) - 1) T / tau, for steps that all take the same."""
    steps = np.full(6_000, 10.0)
    outcome = run_through(steps, interval, SYNCHRONOUS, mtbf=mtbf, restart=600.0, seed=0, draws=60)
    tau = outcome.work
    expected = mtbf * math.exp(600 / mtbf) * math.expm1((tau + 60) / mtbf) * steps.sum() / tau
    assert outcome.seconds == pytest.approx(expected, rel=0.02)


def test_the_best_interval_is_about_youngs() -> None:
    """The optimum is flat: Young's interval loses next to nothing against the best, which lies near it."""
    steps, mtbf = np.full(20_000, 10.0), 6 * HOUR
    wanted = young(60.0, mtbf) / 10.0
    tried = [
        run_through(steps, interval, SYNCHRONOUS, mtbf=mtbf, restart=600.0, seed=0, draws=40)
        for interval in intervals_around(wanted, 20_000)
    ]
    best = max(tried, key=lambda one: one.goodput)
    assert 0.5 <= best.interval / wanted <= 2
    at_youngs = min(tried, key=lambda one: abs(one.interval - wanted))
    assert best.goodput - at_youngs.goodput < 0.003
    assert tried[0].goodput < best.goodput - 0.03 > tried[-1].goodput


def test_an_asynchronous_save_is_not_safe_until_it_is_written() -> None:
    """With a write as long as three intervals, a failure costs more steps than the stall of a save saves here."""
    quick, slow = run(saves=Saves(stall=2.0, write=2.0)), run(saves=Saves(stall=2.0, write=450.0))
    assert slow.redone > quick.redone
    assert quick.saving == pytest.approx(slow.saving)
    overlapping = run(saves=Saves(stall=2.0, write=1_500.0), mtbf=math.inf)  # 500 s of steps between two saves
    assert overlapping.seconds == pytest.approx(STEPS.sum() + 2.0 * 100 + _waits(1_498.0))


def _waits(write: float) -> float:
    between = STEPS.reshape(100, 50).sum(axis=1)[1:]
    return float(np.maximum(write - between, 0).sum())


@pytest.mark.parametrize(("interval", "mtbf", "restart"), [(1_000, 100.0, 10.0), (1, 10.0, 10_000.0)])
def test_a_run_that_gets_nowhere_says_so(interval: int, mtbf: float, restart: float) -> None:
    """Either no interval passes without a failure, or no restart does."""
    outcome = run_through(STEPS, interval, SYNCHRONOUS, mtbf=mtbf, restart=restart, seed=0, draws=2)
    assert outcome.seconds == math.inf
    assert outcome.goodput == 0.0


def test_short_runs_are_drawn_until_failures_show() -> None:
    assert enough_draws(HOUR, 2 * HOUR) == 800
    assert enough_draws(1_000 * HOUR, HOUR) == 20
    outcome = run_through(STEPS, 50, SYNCHRONOUS, mtbf=150 * HOUR, restart=600.0, seed=0, draws=4_000)
    assert outcome.failures == pytest.approx(outcome.seconds / (150 * HOUR), rel=0.15)


def test_intervals_stay_within_the_run() -> None:
    assert intervals_around(0.2, 100)[0] == 1
    assert intervals_around(90.0, 100)[-1] == 100
    assert intervals_around(64.0, 10_000)[::6] == [8, 64, 512]
