"""Cross-entropy whose logits never exist whole, and the terms that a global batch's loss is divided from.

Legend: t tokens on this rank, D hidden, v vocabulary entries on this tensor-parallel rank, b tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the output matrix this rank holds.

    Attributes:
        first: the token id of the first row.
        size: V, the real vocabulary; rows from it on are padding and never enter the softmax.
        group: the tensor-parallel group over which the rows are shared out; None where one rank has all.
    """

    first: int
    size: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class LossTerms:
    """Sums over tokens, still to be added over micro-batches and ranks; divided once per global batch.

    Attributes:
        weighted_sum: float64 scalar, sum of weight * loss, whose quotient by `denominator` is minimised.
        denominator: float64 scalar, the number of trained tokens.
        loss_sum: float64 scalar, sum of the unweighted losses of the trained tokens.
        token_count: float64 scalar, the number of trained tokens.
    """

    weighted_sum: Tensor
    denominator: Tensor
    loss_sum: Tensor
    token_count: Tensor

    def stacked(self) -> Tensor:
        """float64 [4], for one reduction."""
        return torch.stack([self.weighted_sum, self.denominator, self.loss_sum, self.token_count])


def loss_terms(losses_t: Tensor, weights_t: Tensor, trained_t: Tensor) -> tuple[Tensor, LossTerms]:
    """Sum per-token losses.

    Args:
        losses_t: float32 [t], with gradient.
        weights_t: float32 [t], multiplied with the losses; never a mask.
        trained_t: bool [t]; other tokens count nowhere, whatever their loss (NaN included).

    Returns:
        The float32 scalar to run backward from, and the detached terms.
    """
    kept = torch.where(trained_t, losses_t, 0.0)
    weighted = kept * torch.where(trained_t, weights_t, 0.0)
    count = trained_t.sum(dtype=torch.float64)
    terms = LossTerms(
        weighted_sum=weighted.detach().sum(dtype=torch.float64),
        denominator=count,
        loss_sum=kept.detach().sum(dtype=torch.float64),
        token_count=count,
    )
    return weighted.sum(), terms


def cross_entropy(
    hidden_tD: Tensor, weight_vD: Tensor, labels_t: Tensor, shard: VocabularyShard, block_tokens: int
) -> Tensor:
    """Per-token -log p(label), computed and differentiated in blocks of tokens.

    Forward keeps the log-sum-exp of each token; backward computes each block's logits again. Memory beyond
    the arguments is one block of logits, float32 [block_tokens, v], and the weight's gradient.

    Args:
        hidden_tD: the last layer's output, the same on every rank of `shard.group`.
        weight_vD: this rank's rows of the output matrix.
        labels_t: int64 [t], 0 <= label < shard.size.
        shard: which rows these are.
        block_tokens: b, tokens whose logits exist at one time.

    Returns:
        float32 [t], the same on every rank of the group. The gradient of `hidden_tD` is this rank's part:
        the caller sums it over the group.
    """
    losses: Tensor = _BlockedCrossEntropy.apply(hidden_tD, weight_vD, labels_t, shard, block_tokens)
    return losses


class _BlockedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_tD: Tensor, weight_vD: Tensor, labels_t: Tensor, shard: VocabularyShard, block: int
    ) -> Tensor:
        losses, normalisers = [], []
        for hidden_bD, labels_b in zip(hidden_tD.split(block), labels_t.split(block), strict=True):
            logits_bv = _logits(hidden_bD, weight_vD, shard)
            normaliser_b = _log_sum_exp(logits_bv, shard)
            losses.append(normaliser_b - _label_logits(logits_bv, labels_b, shard))
            normalisers.append(normaliser_b)
        ctx.save_for_backward(hidden_tD, weight_vD, labels_t, torch.cat(normalisers))
        ctx.shard, ctx.block = shard, block
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_t,) = grads
        hidden_tD, weight_vD, labels_t, normaliser_t = ctx.saved_tensors
        grad_hidden_tD = torch.empty_like(hidden_tD)
        grad_weight_vD = torch.zeros_like(weight_vD, dtype=torch.float32)
        for start in range(0, len(labels_t), ctx.block):
            at = slice(start, start + ctx.block)
            hidden_bD = hidden_tD[at]
            logits_bv = _logits(hidden_bD, weight_vD, ctx.shard)
            grad_bv = logits_bv.sub_(normaliser_t[at, None]).exp_()  # the probabilities
            row_b, index_b, here_b = _local_labels(labels_t[at], logits_bv.shape[1], ctx.shard)
            grad_bv[row_b, index_b] -= here_b.to(grad_bv.dtype)
            grad_bv = grad_bv.mul_(grad_t[at, None]).to(weight_vD.dtype)
            grad_hidden_tD[at] = grad_bv @ weight_vD
            grad_weight_vD += grad_bv.T @ hidden_bD
        return grad_hidden_tD, grad_weight_vD.to(weight_vD.dtype), None, None, None


def _logits(hidden_bD: Tensor, weight_vD: Tensor, shard: VocabularyShard) -> Tensor:
    logits_bv = (hidden_bD @ weight_vD.T).float()
    logits_bv[:, max(shard.size - shard.first, 0) :] = -torch.inf
    return logits_bv


def _log_sum_exp(logits_bv: Tensor, shard: VocabularyShard) -> Tensor:
    highest_b = logits_bv.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(highest_b, op=dist.ReduceOp.MAX, group=shard.group)
    sum_b = (logits_bv - highest_b[:, None]).exp_().sum(dim=1)
    if shard.group is not None:
        dist.all_reduce(sum_b, group=shard.group)
    return highest_b + sum_b.log_()


def _label_logits(logits_bv: Tensor, labels_b: Tensor, shard: VocabularyShard) -> Tensor:
    row_b, index_b, here_b = _local_labels(labels_b, logits_bv.shape[1], shard)
    found_b = torch.where(here_b, logits_bv[row_b, index_b], 0.0)
    if shard.group is not None:
        dist.all_reduce(found_b, group=shard.group)
    return found_b


def _local_labels(labels_b: Tensor, entries: int, shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers, label columns clamped to this shard, and where the label really lies in this shard."""
    local_b = labels_b - shard.first
    here_b = (local_b >= 0) & (local_b < entries)
    return torch.arange(len(labels_b), device=labels_b.device), local_b.clamp(0, entries - 1), here_b
