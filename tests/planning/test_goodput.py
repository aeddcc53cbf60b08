"""Goodput against the limits of Daly's formula and a simulated run."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.planning.report import daly_slowdown, young_interval


def test_the_best_interval_is_about_youngs() -> None:
    best = young_interval(60.0, 6 * 3600)
    slowdowns = [daly_slowdown(best * factor, 60.0, 600.0, 6 * 3600) for factor in (0.25, 1.0, 4.0)]
    assert slowdowns[1] == min(slowdowns)


def test_the_slowdown_is_that_of_a_run_with_random_failures() -> None:
    interval, save, restart, failure = 900.0, 60.0, 300.0, 3600.0
    chance, seconds = np.random.default_rng(0), 0.0
    for _ in range(4000):  # segments of work, each begun anew after a failure
        while (until := chance.exponential(failure)) < interval + save:
            seconds += until
            while (down := chance.exponential(failure)) < restart:
                seconds += down
            seconds += restart
        seconds += interval + save
    assert seconds / (4000 * interval) == pytest.approx(daly_slowdown(interval, save, restart, failure), rel=0.05)
