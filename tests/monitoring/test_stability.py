from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from megatron_ext.monitoring.stability import Stability, stability


def test_the_four_figures() -> None:
    ratio = (5 * 3.0 + 4 * 1.0) / 9
    expected = Stability(volatility=1.0, smoothness=2.0, loss_ratio=ratio, gradient_norm=0.75)
    assert stability([1.0, 3.0] * 5, [0.5, 2.0]) == expected
    # t = 10: nine 0 and a 1 -> sqrt(0.1 * 0.9) = 0.3; t = 11: eight 0 and two 1 -> sqrt(0.2 * 0.8) = 0.4.
    assert stability([1.0] * 9 + [2.0, 2.0], [1.0]).volatility == pytest.approx((0.3 + 0.4) / 2)


def test_too_few_steps_and_non_finite_values_give_nan() -> None:
    assert np.isnan(astuple(stability([1.0] * 9, [1.0]))).tolist() == [True, False, False, False]
    assert np.isnan(astuple(stability([1.0], []))).all()
    values = np.array([1.0] * 12 + [np.nan])
    assert np.isnan(astuple(stability(values, values))).all()
