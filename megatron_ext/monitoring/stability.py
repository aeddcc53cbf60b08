"""Measure how steadily a run trains: the four figures of the SkyLadder paper, over the given steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

VOLATILITY_SPAN = 10  # the paper's L[t-9..t]


@dataclass(frozen=True)
class Stability:
    """The four stability figures; lower is steadier, and a loss that falls at every step has a loss ratio below 1.

    L_t is the training loss and G_t the gradient norm before clipping, t = 1..n. A figure is NaN if a value is not
    finite, or if there are too few steps.

    Attributes:
        volatility: mean over t >= 10 of Std(L[t-9..t]), the population standard deviation; nats.
        smoothness: mean over t >= 2 of |L_t - L_{t-1}|; nats per step.
        loss_ratio: mean over t >= 2 of L_t / min(L_1..L_{t-1}).
        gradient_norm: mean of min(G_t, 1).
    """

    volatility: float
    smoothness: float
    loss_ratio: float
    gradient_norm: float


def stability(losses: npt.ArrayLike, gradient_norms: npt.ArrayLike) -> Stability:
    """Compute all four figures of consecutive steps: losses [n] in nats, unclipped gradient norms [n]."""
    loss, norm = np.asarray(losses, dtype=np.float64), np.asarray(gradient_norms, dtype=np.float64)
    spread = np.array([])
    if loss.size >= VOLATILITY_SPAN:
        spread = np.lib.stride_tricks.sliding_window_view(loss, VOLATILITY_SPAN).std(axis=1)
    return Stability(
        volatility=_mean(spread),
        smoothness=_mean(np.abs(np.diff(loss))),
        loss_ratio=_mean(loss[1:] / np.minimum.accumulate(loss)[:-1]),
        gradient_norm=_mean(np.minimum(norm, 1.0)),
    )


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")
