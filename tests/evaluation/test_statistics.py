"""Comparisons of two models against sums over all possibilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_ext.evaluation.statistics import difference, mcnemar


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (1, 0), (2, 9), (6, 6), (12, 1)])
def test_mcnemar_counts_the_splits_that_are_no_likelier(only_first: int, only_second: int) -> None:
    first = np.array([True] * 5 + [False] * 3 + [True] * only_first + [False] * only_second)
    second = np.array([True] * 5 + [False] * 3 + [False] * only_first + [True] * only_second)
    found = mcnemar(first, second)
    assert (found["only_first"], found["only_second"]) == (only_first, only_second)
    n = only_first + only_second
    likely = [math.comb(n, k) / 2**n for k in range(n + 1)]
    assert found["p_value"] == pytest.approx(sum(p for p in likely if p <= likely[only_first] * (1 + 1e-9)))


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
