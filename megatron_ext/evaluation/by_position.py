"""The loss by how much context a token has: position p of its segment, from 0, falls into bin floor(log2(p + 1))."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 32


def sums_by_position(loss_t: Tensor, positions_t: Tensor, trained_t: Tensor) -> Tensor:
    """Losses and counts of the trained tokens by bin; sums of several batches and ranks add up.

    Args:
        loss_t: float32 [t], -log p(label).
        positions_t: int [t], the place within the segment: a token sees this many before itself.
        trained_t: bool [t]; other tokens count nowhere.

    Returns:
        float64 [2, BINS].
    """
    bin_t = torch.frexp((positions_t + 1).double()).exponent.long() - 1
    sums = torch.zeros(2, BINS, dtype=torch.float64, device=loss_t.device)
    sums[0].index_add_(0, bin_t, torch.where(trained_t, loss_t, 0.0).double())
    sums[1].index_add_(0, bin_t, trained_t.double())
    return sums


@dataclass(frozen=True, eq=False)
class PositionLosses:
    """Summed losses of a validation set.

    Attributes:
        sums: float64 [2, BINS], as `sums_by_position` gives them, on the host.
    """

    sums: Tensor

    def __add__(self, other: PositionLosses) -> PositionLosses:
        return PositionLosses(self.sums + other.sums)

    @property
    def lm_loss(self) -> float:
        """Mean over all trained tokens; 0 where there is none."""
        loss, count = self.sums.sum(dim=1).tolist()
        return loss / count if count else 0.0

    @property
    def by_position(self) -> dict[int, float]:
        """Mean loss of the tokens with at least this many keys, itself included, and fewer than twice as many."""
        pairs = enumerate(self.sums.T.tolist())
        return {2**power: loss / count for power, (loss, count) in pairs if count}
