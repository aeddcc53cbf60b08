"""Measure how steadily a run trains: the four figures of the SkyLadder paper, over the given steps.

L_t is the training loss and G_t the gradient norm before clipping, t = 1..n. A non-finite value makes the affected
figures NaN, as does an insufficient number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

VOLATILITY_SPAN = 10  # the paper's L[t-9..t]

Series = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stability:
    """The four stability figures; lower is steadier, and a loss that falls at every step has a loss ratio below 1."""

    volatility: float  # nats
    smoothness: float  # nats per step
    loss_ratio: float
    gradient_norm: float  # at most 1


def stability(losses: npt.ArrayLike, gradient_norms: npt.ArrayLike) -> Stability:
    """Compute all four figures of consecutive steps: losses [n] in nats, unclipped gradient norms [n]."""
    return Stability(
        volatility=volatility(losses),
        smoothness=smoothness(losses),
        loss_ratio=mean_loss_ratio(losses),
        gradient_norm=mean_clipped_gradient_norm(gradient_norms),
    )


def volatility(losses: npt.ArrayLike) -> float:
    """Return the mean over t >= 10 of Std(L[t-9..t]), the population standard deviation (divided by 10, not 9)."""
    series = _series(losses)
    if series.size < VOLATILITY_SPAN:
        return float("nan")
    spans = np.lib.stride_tricks.sliding_window_view(series, VOLATILITY_SPAN)
    return float(spans.std(axis=1).mean())


def smoothness(losses: npt.ArrayLike) -> float:
    """Return the mean over t >= 2 of |L_t - L_{t-1}|."""
    return _mean(np.abs(np.diff(_series(losses))))


def mean_loss_ratio(losses: npt.ArrayLike) -> float:
    """Return the mean over t >= 2 of L_t / min(L_1..L_{t-1}); losses are positive."""
    series = _series(losses)
    return _mean(series[1:] / np.minimum.accumulate(series)[:-1])


def mean_clipped_gradient_norm(gradient_norms: npt.ArrayLike) -> float:
    """Return the mean of min(G_t, 1)."""
    return _mean(np.minimum(_series(gradient_norms), 1.0))


def _series(values: npt.ArrayLike) -> Series:
    series = np.asarray(values, dtype=np.float64)
    assert series.ndim == 1, series.shape
    return series


def _mean(values: Series) -> float:
    return float(values.mean()) if values.size else float("nan")
