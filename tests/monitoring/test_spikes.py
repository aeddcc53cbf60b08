"""A spike by its definition, and what is none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_ext.monitoring.spikes import SpikeWatch

LOSSES = [3.0, 2.5, 2.75, 2.25]


def test_the_bound_is_the_mean_and_so_many_deviations_of_the_window() -> None:
    watch = SpikeWatch(3, 2.0, LOSSES)
    expected = watch.expected()
    assert expected is not None
    assert expected.mean == pytest.approx(np.mean(LOSSES[1:]))
    assert expected.bound == pytest.approx(np.mean(LOSSES[1:]) + 2 * np.std(LOSSES[1:]))


def test_the_window_is_full_before_anything_is_a_spike_and_moves_on() -> None:
    watch = SpikeWatch(3, 2.0)
    for loss in LOSSES[:2]:
        watch.note(loss)
        assert watch.expected() is None
    watch.note(LOSSES[2])
    first = watch.expected()
    watch.note(LOSSES[3])
    assert first is not None
    assert watch.expected() == SpikeWatch(3, 2.0, LOSSES).expected() != first


def test_what_is_not_finite_is_left_out() -> None:
    watch = SpikeWatch(3, 2.0, [math.nan, *LOSSES, math.inf])
    watch.note(math.nan)
    assert watch.expected() == SpikeWatch(3, 2.0, LOSSES).expected()


def test_a_loss_that_stays_high_is_soon_expected() -> None:
    watch, spikes = SpikeWatch(8, 4.0, [1.0, 1.1] * 4), 0
    for _ in range(20):
        expected = watch.expected()
        assert expected is not None
        spikes += expected.bound < 5.0
        watch.note(5.0)
    assert spikes == 1


def test_without_a_deviation_rounding_is_no_spike() -> None:
    expected = SpikeWatch(4, 7.0, [2.0] * 4).expected()
    assert expected is not None
    assert 2.0 * (1 + 1e-7) < expected.bound < 2.001


def test_a_window_of_0_never_finds_one() -> None:
    watch = SpikeWatch(0, 7.0, LOSSES)
    watch.note(1.0)
    assert watch.expected() is None
