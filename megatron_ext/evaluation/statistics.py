"""Compare two models on the same items: bootstrap intervals and McNemar's test, with scipy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatron_ext.arrays import Bool, Float64
from megatron_ext.errors import missing_package

Key = tuple[str, str, int | None]  # task, metric, length
RESAMPLES = 5000
CONFIDENCE = 0.95


def check_scipy() -> None:
    """Raise a UserError if scipy is not installed."""
    _stats()


def mcnemar(first: Bool, second: Bool) -> dict[str, Any]:
    """Run McNemar's exact two-sided test.

    Args:
        first, second: bool [items], whether each model answered the item correctly.

    Returns:
        only_first, only_second: number of items that only one model answered correctly; p_value.
    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    split = only_first + only_second
    p_value = float(_stats().binomtest(only_first, split, 0.5).pvalue) if split else 1.0
    return {"only_first": only_first, "only_second": only_second, "p_value": p_value}


def difference(first: Float64, second: Float64, weights: Float64 | None = None, seed: int = 0) -> dict[str, Any]:
    """Estimate the difference of two means by a paired bootstrap over the items.

    Args:
        first, second: float64 [items], sums over each item, such as the losses of a document's tokens.
        weights: float64 [items], number of terms in each sum, such as the document's tokens; None for 1 each.
        seed: of the resampling.

    Returns:
        value: sum(second - first) / sum(weights); low, high: its 95 % interval, None for a single item.
    """
    sums, over = second - first, np.ones(len(first)) if weights is None else weights
    value = float(sums.sum() / over.sum())
    if len(sums) < 2:
        return {"value": value, "low": None, "high": None}

    def ratio(some: Float64, counts: Float64, axis: int = -1) -> Float64:
        answer: Float64 = some.sum(axis=axis) / counts.sum(axis=axis)
        return answer

    found = _stats().bootstrap(
        (sums, over),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, 2**22 // len(sums)),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = found.confidence_interval
    return {"value": value, "low": float(low), "high": float(high)}


def compare(models: Mapping[str, Mapping[Key, Float64]]) -> Iterator[dict[str, Any]]:
    """Compare each model with the first one, on the same items.

    Args:
        models: name -> (task, metric, length) -> float64 [items], scores; length is None if the task has none.
    """
    (first, base), *others = models.items()
    for second, other in others:
        for key, scores in base.items():
            if key not in other or len(other[key]) != len(scores):
                continue
            task, metric, length = key
            found: dict[str, Any] = {"first": first, "second": second, "task": task, "metric": metric}
            if length is not None:
                found["length"] = length
            right = scores == 1.0, other[key] == 1.0
            yield found | difference(scores, other[key]) | mcnemar(*right)


def _stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise missing_package("comparing models", "scipy") from None
    return stats
