"""Loss by the amount of context: position p in its segment, from 0, falls into bin floor(log2(p + 1))."""

import torch
from torch import Tensor

BINS = 32


def bin_of(positions: Tensor) -> Tensor:
    """Return floor(log2(p + 1)) of each position; int64."""
    return torch.frexp((positions + 1).double()).exponent.long() - 1


def sums_by_position(loss_t: Tensor, positions_t: Tensor, trained_t: Tensor) -> Tensor:
    """Sum and count the losses of trained tokens by bin. Sums of batches and ranks can be added.

    Args:
        loss_t: float32 [t], -log p(label).
        positions_t: int [t], position in the segment: the number of tokens before it.
        trained_t: bool [t]; other tokens are not counted.

    Returns:
        float64 [2, BINS].
    """
    bin_t = bin_of(positions_t)
    sums = torch.zeros(2, BINS, dtype=torch.float64, device=loss_t.device)
    sums[0].index_add_(0, bin_t, torch.where(trained_t, loss_t, 0.0).double())
    sums[1].index_add_(0, bin_t, trained_t.double())
    return sums


def mean_loss(sums: Tensor) -> float | None:
    """Return the mean over all tokens of `sums_by_position`; None if there are none."""
    loss, count = sums.sum(dim=1).tolist()
    if not count:
        return None
    return loss / count


def losses_by_position(sums: Tensor) -> dict[int, float]:
    """Return the mean loss by number of keys n: over the tokens that see at least n and fewer than 2n tokens."""
    pairs = enumerate(sums.T.tolist())
    return {2**power: loss / count for power, (loss, count) in pairs if count}
