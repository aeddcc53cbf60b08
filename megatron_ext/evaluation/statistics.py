"""Whether two models differ, on the same items: McNemar's test and bootstrap intervals, by scipy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_ext.arrays import Bool, Float64
from megatron_ext.errors import missing_package

RESAMPLES = 5000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Holds a figure and the interval that `CONFIDENCE` of the resampled ones lie in; None of a single item."""

    value: float
    low: float | None
    high: float | None

    def record(self) -> dict[str, Any]:
        """Make the JSON of it."""
        return asdict(self)

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.value:+.4f}"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


@dataclass(frozen=True)
class McNemar:
    """Compares two models that were right or wrong on the same items.

    Attributes:
        only_first, only_second: items that one of them alone has right.
        p_value: exact and two-sided, of as uneven a split of those items where both models are equally good.
    """

    only_first: int
    only_second: int
    p_value: float

    def record(self) -> dict[str, Any]:
        """Make the JSON of it."""
        return asdict(self)


def check_scipy() -> None:
    """Raise a UserError where scipy is missing."""
    _stats()


def mcnemar(first: Bool, second: Bool) -> McNemar:
    """Run McNemar's exact test.

    Args:
        first, second: bool [items], whether each model has the item right.
    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    split = only_first + only_second
    p_value = float(_stats().binomtest(only_first, split, 0.5).pvalue) if split else 1.0
    return McNemar(only_first, only_second, p_value)


def difference(first: Float64, second: Float64, weights: Float64 | None = None, seed: int = 0) -> Interval:
    """Estimate how much higher the second model's figures are, resampling the items of both together.

    Args:
        first, second: float64 [items], sums over each item, such as the losses of a document's tokens.
        weights: float64 [items], what the sums are over, such as the document's tokens; None for 1 each.
        seed: of the resampling.
    """
    return mean(second - first, weights, seed)


def mean(sums: Float64, weights: Float64 | None = None, seed: int = 0) -> Interval:
    """Estimate sum(sums) / sum(weights), resampling the items; arguments as of `difference`."""
    over = np.ones(len(sums)) if weights is None else weights
    value = float(sums.sum() / over.sum())
    if len(sums) < 2:
        return Interval(value, None, None)

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
    return Interval(value, float(found.confidence_interval.low), float(found.confidence_interval.high))


def _stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise missing_package("comparing models", "scipy") from None
    return stats
