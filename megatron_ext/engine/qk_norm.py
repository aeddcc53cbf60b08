"""RMSNorm of queries or keys over all heads together (Olmo 3), exact under tensor parallelism.

    y = w x / sqrt(mean(x^2) + eps), the mean over all N H numbers of a token

A tensor-parallel rank holds N / tp heads of x and w. The ranks sum the squares in forward, and in backward the products
of x with its gradient. Megatron and Transformer Engine only normalize each head alone.

Legend: t tokens, N heads of this rank, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor


class HeadsNorm(torch.nn.Module):
    """Normalizes all heads of a token together, and multiplies by this rank's part of the weight, [N * H].

    `heads` are those of all tensor-parallel ranks; `hidden_size` is H.
    """

    def __init__(self, heads: int, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        group = get_tensor_model_parallel_group()
        self.width, self.eps, self.group = heads * hidden_size, eps, group if group.size() > 1 else None
        self.weight = torch.nn.Parameter(torch.ones(self.width // group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x_t1NH: Tensor) -> Tensor:
        """Return x normalized, [t, 1, N, H], in the dtype of x."""
        normed: Tensor = _Normalize.apply(x_t1NH, self.weight.view(x_t1NH.shape[-2:]), self.width, self.eps, self.group)
        return normed


class _Normalize(torch.autograd.Function):
    """Computes in fp32; keeps x, where possible a view of the projection, and one number per token."""

    @staticmethod
    def forward(
        ctx: Any, x_t1NH: Tensor, weight_NH: Tensor, width: int, eps: float, group: dist.ProcessGroup | None
    ) -> Tensor:
        squares_t111 = torch.linalg.vector_norm(x_t1NH, dim=(-2, -1), keepdim=True, dtype=torch.float32).square()
        scale_t111 = torch.rsqrt(_summed(squares_t111, group) / width + eps)
        ctx.save_for_backward(x_t1NH, weight_NH, scale_t111)
        ctx.width, ctx.group = width, group
        return (x_t1NH * scale_t111).mul_(weight_NH).to(x_t1NH.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_t1NH: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_t1NH, weight_NH, scale_t111 = ctx.saved_tensors
        normed_t1NH = x_t1NH * scale_t111
        products_t1NH = grad_t1NH * normed_t1NH
        grad_weight_NH = products_t1NH.sum(dim=(0, 1)).to(weight_NH.dtype)
        along_t111 = _summed(products_t1NH.mul_(weight_NH).sum(dim=(-2, -1), keepdim=True), ctx.group)
        del products_t1NH
        grad_x_t1NH = normed_t1NH.mul_(along_t111 / -ctx.width).add_(grad_t1NH * weight_NH.float()).mul_(scale_t111)
        return grad_x_t1NH.to(x_t1NH.dtype), grad_weight_NH, None, None, None


def _summed(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over tensor-parallel ranks, in place; None: a single rank."""
    if group is not None:
        dist.all_reduce(partial, group=group)
    return partial
