"""The loss by how much context a token has: position p of its segment, from 0, falls into bin floor(log2(p + 1))."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BINS = 32


def sums_by_position(loss_t: Tensor, positions_t: Tensor, trained_t: Tensor) -> Tensor:
    """Sum the losses of the trained tokens, and count them, by bin; sums of several batches and ranks add up.

    Args:
        loss_t: float32 [t], -log p(label).
        positions_t: int [t], the position within the segment: a token sees this many before itself.
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
    """Holds the summed losses of a validation set.

    Attributes:
        sums: float64 [2, BINS], as `sums_by_position` gives them, on the host.
    """

    sums: Tensor

    def __add__(self, other: PositionLosses) -> PositionLosses:
        return PositionLosses(self.sums + other.sums)

    @property
    def lm_loss(self) -> float | None:
        """Mean over all trained tokens; None where there is none."""
        loss, count = self.sums.sum(dim=1).tolist()
        return loss / count if count else None

    @property
    def by_position(self) -> dict[int, float]:
        """Mean loss of the tokens with at least this many keys, itself included, and fewer than twice as many."""
        pairs = enumerate(self.sums.T.tolist())
        return {2**power: loss / count for power, (loss, count) in pairs if count}


def evaluation_record(
    step: int,
    tokens: int,
    losses: Mapping[int, PositionLosses],
    *,
    document_mask: bool = False,
    stride: int | None = None,
) -> dict[str, Any]:
    """Make a line of evaluation.jsonl, by context length; what no trained token tells is None, not a perfect 0.

    Args:
        step: completed steps.
        tokens: that were read at each length.
        losses: at each context length.
        document_mask: whether attention stayed inside documents. Losses of one record compare with those of another
            only where this and `stride` are the same.
        stride: of windows that slide; None where the context is cut in blocks.
    """
    longest = losses[max(losses)]
    loss = longest.lm_loss
    return {
        "step": step,
        "valid_loss": loss,
        "valid_perplexity": None if loss is None else math.exp(min(loss, 700.0)),  # beyond it a float overflows
        "tokens": tokens,
        "document_mask": document_mask,
        "stride": stride,
        "by_length": {str(length): at.lm_loss for length, at in losses.items()},
        "by_position": {str(keys): mean for keys, mean in longest.by_position.items()},
    }
