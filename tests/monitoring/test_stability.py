from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_ext.monitoring.stability import (
    Stability,
    mean_clipped_gradient_norm,
    mean_loss_ratio,
    smoothness,
    stability,
    volatility,
)


def test_volatility_averages_over_every_span_of_ten():
    # t = 10: nine 0 and a 1 -> sqrt(0.1 * 0.9) = 0.3; t = 11: eight 0 and two 1 -> sqrt(0.2 * 0.8) = 0.4.
    assert volatility([0.0] * 9 + [1.0, 1.0]) == pytest.approx((0.3 + 0.4) / 2)


def test_all_four_together():
    losses, norms = [1.0, 3.0] * 5, [0.5, 2.0]
    ratio = (5 * 3.0 + 4 * 1.0) / 9
    expected = Stability(volatility=1.0, smoothness=2.0, loss_ratio=ratio, gradient_norm=0.75)
    assert stability(losses, norms) == expected


@pytest.mark.parametrize(
    ("figure", "too_short"),
    [
        (volatility, [1.0] * 9),
        (smoothness, [1.0]),
        (mean_loss_ratio, [1.0]),
        (mean_clipped_gradient_norm, []),
    ],
)
def test_too_few_steps_give_nan_and_one_more_does_not(figure, too_short):
    assert math.isnan(figure(too_short))
    assert math.isfinite(figure([*too_short, 1.0]))


@pytest.mark.parametrize("figure", [volatility, smoothness, mean_loss_ratio, mean_clipped_gradient_norm])
def test_a_non_finite_step_is_not_hidden(figure):
    assert math.isnan(figure(np.array([1.0] * 12 + [np.nan])))
