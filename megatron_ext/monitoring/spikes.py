"""Tells a loss spike from the losses before it, as OLMo 2 counts them (arXiv 2501.00656): beside a rolling mean."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_ROUNDING = 1e-6  # of the mean: a loss that never changes has no deviation to measure by


@dataclass(frozen=True)
class Expected:
    """Says what the losses before a step let expect: their mean, and the bound above which a loss is a spike."""

    mean: float
    bound: float


class SpikeWatch:
    """Keeps the finite losses of the last `window` steps; a loss above mean + deviations * std of them is a spike.

    The deviation is the population's. Before there are `window` losses, nothing is a spike. One that is counts among
    the losses before the next, so that a loss which stays high is soon what is expected.

    Args:
        window: steps; 0 never finds a spike.
        deviations: standard deviations.
        losses: of the steps before, the latest last.
    """

    def __init__(self, window: int, deviations: float, losses: Iterable[float] = ()) -> None:
        self.window, self.deviations = window, deviations
        self._losses: deque[float] = deque((loss for loss in losses if math.isfinite(loss)), maxlen=window)

    @property
    def losses(self) -> list[float]:
        """The losses of the steps before, the latest last."""
        return list(self._losses)

    def expected(self) -> Expected | None:
        """Return the bound of the next loss; None where too few are known."""
        if not self.window or len(self._losses) < self.window:
            return None
        losses = np.array(self._losses)
        mean = float(losses.mean())
        return Expected(mean, mean + self.deviations * max(float(losses.std()), _ROUNDING * abs(mean)))

    def note(self, loss: float) -> None:
        """Take a step's loss up; one that is not finite is left out."""
        if math.isfinite(loss):
            self._losses.append(loss)
