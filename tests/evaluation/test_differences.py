"""Comparisons of two models by paired bootstrap samples."""

import numpy as np
import pytest

from megatron_ext.evaluation.report import difference


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Differences of known mean and weight: of 100 samples, about 95 intervals hold it."""
    draw = np.random.default_rng(0)
    held = 0
    for number in range(100):
        weights = draw.integers(50, 200, 60).astype(float)
        first = draw.normal(3.0, 0.5, 60) * weights
        second = first + draw.normal(0.1, 0.3, 60) * weights
        found = difference(first, second, weights, seed=number)
        assert found["value"] == pytest.approx((second - first).sum() / weights.sum())
        held += found["low"] <= 0.1 <= found["high"]
    assert 85 <= held <= 99


def test_one_item_has_no_interval() -> None:
    found = difference(np.array([1.0]), np.array([3.0]), np.array([4.0]))
    assert found == {"value": 0.5, "low": None, "high": None}
