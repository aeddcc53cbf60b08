"""Permute rows. Unlike torch's `index_select`, the backward is a gather, without atomics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def reordered(x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
    """Return x[rows] for a permutation.

    Args:
        x: [n, ...].
        rows: int64 [n], a permutation.
        back: int64 [n], its inverse.
    """
    taken: Tensor = _Take.apply(x, rows, back)
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
