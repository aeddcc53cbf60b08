"""Detect loss spikes relative to a rolling mean, as in OLMo 2 (arXiv 2501.00656)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

_ROUNDING = 1e-6  # relative to the mean: a constant loss has no standard deviation


class SpikeWatch:
    """Keeps the finite losses of the last `window` steps; a loss above mean + deviations * std of them is a spike.

    The standard deviation is the population's. Before there are `window` losses, nothing is a spike. Spikes are
    included in the window, so a loss that stays high soon becomes the expected value.

    A window of 0 never finds a spike. `losses` are of the previous steps, the latest last.
    """

    def __init__(self, window: int, deviations: float, losses: Iterable[float] = ()) -> None:
        self.window, self.deviations = window, deviations
        self._losses: deque[float] = deque((loss for loss in losses if math.isfinite(loss)), maxlen=window)

    @property
    def losses(self) -> list[float]:
        """The losses of the previous steps, the latest last."""
        return list(self._losses)

    def bound(self) -> float | None:
        """Return the bound above which the next loss is a spike; None if fewer than `window` losses are known."""
        if not self.window or len(self._losses) < self.window:
            return None
        losses = np.array(self._losses)
        mean = float(losses.mean())
        return mean + self.deviations * max(float(losses.std()), _ROUNDING * abs(mean))

    def note(self, loss: float) -> None:
        """Add a step's loss; non-finite losses are ignored."""
        if math.isfinite(loss):
            self._losses.append(loss)
