"""Which losses are spikes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_ext.run.incidents import SpikeWatch

LOSSES = [3.0, 2.5, 2.75, 2.25]


def test_the_bound_is_the_mean_plus_deviations_of_the_last_window() -> None:
    watch = SpikeWatch(3, 2.0)
    for loss in [math.nan, *LOSSES[:2], math.inf]:
        watch.note(loss)
        assert watch.bound() is None
    for loss in LOSSES[2:]:
        watch.note(loss)
    assert watch.bound() == SpikeWatch(3, 2.0, LOSSES).bound()
    assert watch.bound() == pytest.approx(np.mean(LOSSES[1:]) + 2 * np.std(LOSSES[1:]))


def test_a_loss_that_stays_high_is_a_spike_once() -> None:
    watch, spikes = SpikeWatch(8, 4.0, [1.0, 1.1] * 4), 0
    for _ in range(20):
        bound = watch.bound()
        spikes += bound < 5.0
        watch.note(5.0)
    assert spikes == 1


def test_constant_losses_leave_room_for_rounding() -> None:
    bound = SpikeWatch(4, 7.0, [2.0] * 4).bound()
    assert 2.0 * (1 + 1e-7) < bound < 2.001


def test_a_window_of_0_finds_no_spike() -> None:
    watch = SpikeWatch(0, 7.0, LOSSES)
    watch.note(1.0)
    assert watch.bound() is None
