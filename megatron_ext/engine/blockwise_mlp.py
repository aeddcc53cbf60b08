"""Compute an MLP in blocks of tokens: its inner activations never exist for all tokens (ALST, arXiv 2506.13996).

The MLP works token by token. Forward keeps only its input; backward recomputes one block at a time and adds the blocks'
weight gradients in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.autograd.function import once_differentiable


def install(mlp: MLP, block_tokens: int) -> None:
    """Make an MLP without experts compute at most `block_tokens` tokens at a time.

    Under sequence parallelism, these are block_tokens / tp tokens of each tensor-parallel rank.
    """
    config, whole = mlp.config, mlp.forward
    rows = max(block_tokens // (config.tensor_model_parallel_size if config.sequence_parallel else 1), 1)
    last_bias = mlp.linear_fc2.bias if config.add_bias_linear else None  # returned, and added by the layer
    weights = [weight for weight in mlp.parameters() if weight is not last_bias]

    def forward(hidden_t1D: Tensor, **unused: Any) -> tuple[Tensor, Tensor | None]:
        return _Blocks.apply(whole, rows, weights, hidden_t1D, *weights), last_bias

    mlp.forward = forward


class _Blocks(torch.autograd.Function):
    """Runs an MLP block by block; the weights are arguments only because they get gradients."""

    @staticmethod
    def forward(ctx: Any, mlp: Any, rows: int, weights: list[Tensor], hidden_t1D: Tensor, *unused: Tensor) -> Tensor:
        ctx.mlp, ctx.rows, ctx.weights = mlp, rows, weights
        ctx.save_for_backward(hidden_t1D)
        out_t1D = torch.empty_like(hidden_t1D)
        for out_b1D, hidden_b1D in zip(out_t1D.split(rows), hidden_t1D.split(rows), strict=True):
            out_b1D.copy_(mlp(hidden_b1D)[0])
        return out_t1D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_t1D,) = ctx.saved_tensors
        grad_t1D, grad_hidden_t1D = grads[0], torch.empty_like(hidden_t1D)
        sums: list[Tensor] = []
        for own_b1D, grad_b1D, hidden_b1D in zip(
            *(x.split(ctx.rows) for x in (grad_hidden_t1D, grad_t1D, hidden_t1D)), strict=True
        ):
            with torch.enable_grad():
                input_b1D = hidden_b1D.detach().requires_grad_()
                out_b1D = ctx.mlp(input_b1D)[0]
            own, *parts = torch.autograd.grad(out_b1D, (input_b1D, *ctx.weights), grad_b1D)
            own_b1D.copy_(own)
            # Transformer Engine adds a matrix's gradient to its buffer by itself and returns a placeholder
            sums = [
                part if getattr(weight, "grad_added_to_main_grad", False) else total.float().add_(part)
                for total, part, weight in zip(sums, parts, ctx.weights, strict=True)
            ] if sums else parts  # fmt: skip
            del parts  # before those of the next block are computed
        grad_weights = [total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)]
        return None, None, None, grad_hidden_t1D, *grad_weights
