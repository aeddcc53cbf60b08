"""Compare two models on the same items by paired bootstrap intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatron_ext.arrays import Float64

Key = tuple[str, str, int | None]  # task, metric, length
RESAMPLES = 5000


def difference(first: Float64, second: Float64, weights: Float64 | None = None, seed: int = 0) -> dict[str, Any]:
    """Estimate the difference of two means by a paired bootstrap over the items.

    Args:
        first, second: float64 [items], sums over each item, such as the losses of a document's tokens.
        weights: float64 [items], number of terms in each sum, such as the document's tokens; None for 1 each.
        seed: of the resampling.

    Returns:
        value: sum(second - first) / sum(weights); low, high: its 95 % interval, None for a single item.
    """
    sums, n = second - first, len(first)
    weights = np.ones(n) if weights is None else weights
    value = float(sums.sum() / weights.sum())
    if n < 2:
        return {"value": value, "low": None, "high": None}
    generator = np.random.default_rng(seed)
    draws = (generator.integers(0, n, n) for _ in range(RESAMPLES))
    low, high = np.quantile([sums[draw].sum() / weights[draw].sum() for draw in draws], [0.025, 0.975])
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
            found |= {} if length is None else {"length": length}
            yield found | difference(scores, other[key])
