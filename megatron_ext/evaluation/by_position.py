"""Loss by the amount of context: position p in its segment, from 0, falls into bin floor(log2(p + 1))."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
    return loss / count if count else None


def losses_by_position(sums: Tensor) -> dict[int, float]:
    """Return the mean loss by number of keys n: over the tokens that see at least n and fewer than 2n tokens."""
    pairs = enumerate(sums.T.tolist())
    return {2**power: loss / count for power, (loss, count) in pairs if count}


def evaluation_record(
    step: int,
    tokens: int,
    sums: Mapping[int, Tensor],
    *,
    document_mask: bool = False,
    stride: int | None = None,
) -> dict[str, Any]:
    """Return a line of evaluation.jsonl; losses without trained tokens are None, not 0.

    Args:
        step: completed steps.
        tokens: number of tokens at each length.
        sums: by context length, from `sums_by_position`.
        document_mask: whether attention stayed inside documents. Records are comparable only if this and `stride` are
            equal.
        stride: of sliding windows; None for blocks.
    """
    longest = sums[max(sums)]
    loss = mean_loss(longest)
    return {
        "step": step,
        "valid_loss": loss,
        "valid_perplexity": None if loss is None else math.exp(min(loss, 700.0)),  # avoid float overflow
        "tokens": tokens,
        "document_mask": document_mask,
        "stride": stride,
        "by_length": {str(length): mean_loss(at) for length, at in sums.items()},
        "by_position": {str(keys): mean for keys, mean in losses_by_position(longest).items()},
    }
