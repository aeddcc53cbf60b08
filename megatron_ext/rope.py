"""Rotary angles (RoPE) of given positions, always in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_frequencies(head_size: int, base: float) -> Tensor:
    """float32 [head_size / 2]: base ** (-2k / head_size) for k = 0, 1, ..."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / base**exponents


def angles(positions_t: Tensor, inverse_frequencies_h: Tensor) -> Tensor:
    """Angles in the half-split layout: dimensions k and k + head_size/2 share an angle.

    Args:
        positions_t: int [t], the position of each token that this rank holds.
        inverse_frequencies_h: float32 [head_size / 2].

    Returns:
        float32 [t, head_size], position * frequency, twice side by side.
    """
    angles_th = positions_t.to(torch.float32)[:, None] * inverse_frequencies_h[None]
    return torch.cat((angles_th, angles_th), dim=-1)
