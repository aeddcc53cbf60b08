"""Cross-entropy whose logits never exist whole, and the terms that a global batch's loss is divided from.

Legend: t tokens on this rank, D hidden, v vocabulary entries on this tensor-parallel rank, b tokens of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True)
class VocabularyShard:
    """Says which rows of the output matrix this rank holds.

    Attributes:
        first: the token id of the first row.
        size: V, the real vocabulary; rows from it on are padding and never enter the softmax.
        group: the tensor-parallel group over which the rows are shared out; None where one rank has all.
    """

    first: int
    size: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class TokenLosses:
    """Holds what the loss head says of each token; float32 [t] each, the same on every tensor-parallel rank.

    Attributes:
        cross_entropy_t: -log p(label), with gradient.
        log_partition_t: log of the sum of the exponentiated logits, with gradient.
        entropy_t: of the predicted distribution, in nats, without gradient; None unless asked for.
    """

    cross_entropy_t: Tensor
    log_partition_t: Tensor
    entropy_t: Tensor | None = None


@dataclass(frozen=True)
class LossTerms(Generic[Number]):
    """Holds sums over tokens: float64 scalars of a micro-batch on one rank, or floats of the whole global batch.

    Attributes:
        weighted_sum: sum of weight * loss (and of the z-loss), whose quotient by the denominator is minimised.
        loss_sum: sum of the unweighted losses of the trained tokens.
        token_count: the number of trained tokens.
        weight_sum: sum of their weights.
        weight_square_sum: sum of the squares of their weights.
        zero_count: how many of them have weight 0.
        score_sum: sum of the scores that the weights were made of.
    """

    weighted_sum: Number
    loss_sum: Number
    token_count: Number
    weight_sum: Number
    weight_square_sum: Number
    zero_count: Number
    score_sum: Number

    def stacked(self: LossTerms[Tensor]) -> Tensor:
        """Return float64 [7], in the order of the attributes: one reduction adds them all up."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])


@dataclass(frozen=True)
class GlobalLoss:
    """Holds the loss of one global batch, the same on every process.

    Attributes:
        terms: summed over all ranks and micro-batches.
        denominator: what the weighted sum is divided by, once.
    """

    terms: LossTerms[float]
    denominator: float

    @property
    def train_loss(self) -> float:
        """What the step minimises; 0 where nothing is trained."""
        return self.terms.weighted_sum / self.denominator if self.denominator else 0.0

    @property
    def lm_loss(self) -> float:
        """Mean cross-entropy over the trained tokens; 0 where there is none."""
        return self.terms.loss_sum / self.terms.token_count if self.terms.token_count else 0.0

    @property
    def weight_std(self) -> float:
        """Standard deviation of the trained tokens' weights; 0 where there is none."""
        count = self.terms.token_count or 1.0
        # rounding can leave a variance of equal weights a little below 0
        return math.sqrt(max(self.terms.weight_square_sum / count - (self.terms.weight_sum / count) ** 2, 0.0))


def loss_terms(
    losses: TokenLosses, weights_t: Tensor, trained_t: Tensor, z_loss: float = 0.0, scores_t: Tensor | None = None
) -> tuple[Tensor, LossTerms[Tensor]]:
    """Sum per-token losses.

    Args:
        losses: of the tokens.
        weights_t: float32 [t], multiplied with the cross-entropies; never a mask.
        trained_t: bool [t]; other tokens count nowhere, whatever their loss (NaN included).
        scores_t: float [t], what the weights were made of; only counted.
        z_loss: coefficient of log_partition^2, which weights leave alone (arXiv 2204.02311, section 5).

    Returns:
        The float32 scalar to run backward from, and the detached terms.
    """
    # a multiplication by 0 would keep the NaN of a token that is not trained, and its gradient
    kept = torch.where(trained_t, losses.cross_entropy_t, 0.0)
    weights = torch.where(trained_t, weights_t, 0.0)
    weighted = kept * weights
    if z_loss:
        weighted = weighted + z_loss * torch.where(trained_t, losses.log_partition_t, 0.0).square()
    exact = weights.double()
    terms = LossTerms(
        weighted_sum=weighted.detach().sum(dtype=torch.float64),
        loss_sum=kept.detach().sum(dtype=torch.float64),
        token_count=trained_t.sum(dtype=torch.float64),
        weight_sum=exact.sum(),
        weight_square_sum=exact.square().sum(),
        zero_count=(trained_t & (weights == 0)).sum(dtype=torch.float64),
        score_sum=torch.where(trained_t, 0.0 if scores_t is None else scores_t, 0.0).sum(dtype=torch.float64),
    )
    return weighted.sum(), terms


def cross_entropy(
    hidden_tD: Tensor,
    weight_vD: Tensor,
    labels_t: Tensor,
    shard: VocabularyShard,
    block_tokens: int,
    *,
    entropy: bool = False,
) -> TokenLosses:
    """Compute each token's -log p(label), and its gradient, in blocks of tokens.

    Forward keeps the log-sum-exp of each token; backward computes each block's logits again. Memory beyond
    the arguments is one block of logits, float32 [block_tokens, v], and the weight's gradient; entropies take
    two more blocks.

    Args:
        hidden_tD: the last layer's output, the same on every rank of `shard.group`.
        weight_vD: this rank's rows of the output matrix.
        labels_t: int64 [t], 0 <= label < shard.size.
        shard: which rows these are.
        block_tokens: b, tokens whose logits exist at one time.
        entropy: whether to compute it.

    Returns:
        The losses, the same on every rank of the group. The gradient of `hidden_tD` is this rank's part: the
        caller sums it over the group.
    """
    losses, normalisers, entropies = _BlockedCrossEntropy.apply(
        hidden_tD, weight_vD, labels_t, shard, block_tokens, entropy
    )
    return TokenLosses(losses, normalisers, entropies if entropy else None)


class _BlockedCrossEntropy(torch.autograd.Function):
    """Computes `cross_entropy`; its three outputs are the tensors of `TokenLosses`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_tD: Tensor,
        weight_vD: Tensor,
        labels_t: Tensor,
        shard: VocabularyShard,
        block: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(labels_t)
        losses_t, normaliser_t, entropy_t = (
            hidden_tD.new_empty(size, dtype=torch.float32) for size in (count, count, count * entropy)
        )
        for start in range(0, len(labels_t), block):
            at = slice(start, start + block)
            logits_bv = _logits(hidden_tD[at], weight_vD, shard)
            normaliser_t[at] = _log_sum_exp(logits_bv, shard)
            losses_t[at] = normaliser_t[at] - _label_logits(logits_bv, labels_t[at], shard)
            if entropy:  # last, for it overwrites the logits
                entropy_t[at] = _entropy(logits_bv, normaliser_t[at], shard)
        ctx.save_for_backward(hidden_tD, weight_vD, labels_t, normaliser_t)
        ctx.shard, ctx.block = shard, block
        ctx.mark_non_differentiable(entropy_t)
        return losses_t, normaliser_t, entropy_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        loss_grad_t, partition_grad_t, _ = grads
        hidden_tD, weight_vD, labels_t, normaliser_t = ctx.saved_tensors
        # d(-log p)/d(logits) = probabilities - one-hot label, d(log partition)/d(logits) = probabilities
        both_grad_t = loss_grad_t + partition_grad_t
        grad_hidden_tD = torch.empty_like(hidden_tD)
        grad_weight_vD = torch.zeros_like(weight_vD, dtype=torch.float32)
        for start in range(0, len(labels_t), ctx.block):
            at = slice(start, start + ctx.block)
            hidden_bD = hidden_tD[at]
            logits_bv = _logits(hidden_bD, weight_vD, ctx.shard)
            grad_bv = logits_bv.sub_(normaliser_t[at, None]).exp_()  # the probabilities
            grad_bv = grad_bv.mul_(both_grad_t[at, None])
            row_b, index_b, here_b = _local_labels(labels_t[at], logits_bv.shape[1], ctx.shard)
            grad_bv[row_b, index_b] -= here_b * loss_grad_t[at]
            grad_bv = grad_bv.to(weight_vD.dtype)
            grad_hidden_tD[at] = grad_bv @ weight_vD
            grad_weight_vD += grad_bv.T @ hidden_bD
        return grad_hidden_tD, grad_weight_vD.to(weight_vD.dtype), None, None, None, None


def _logits(hidden_bD: Tensor, weight_vD: Tensor, shard: VocabularyShard) -> Tensor:
    """Return float32 [b, v]; -inf for the padding of the vocabulary, which softmax turns into 0."""
    logits_bv = (hidden_bD @ weight_vD.T).float()
    logits_bv[:, max(shard.size - shard.first, 0) :] = -torch.inf
    return logits_bv


def _log_sum_exp(logits_bv: Tensor, shard: VocabularyShard) -> Tensor:
    """Return log of the sum of exp over the whole vocabulary, float32 [b]; the highest logit keeps exp finite."""
    highest_b = logits_bv.amax(dim=1)
    if shard.group is not None:
        dist.all_reduce(highest_b, op=dist.ReduceOp.MAX, group=shard.group)
    sum_b = (logits_bv - highest_b[:, None]).exp_().sum(dim=1)
    if shard.group is not None:
        dist.all_reduce(sum_b, group=shard.group)
    return highest_b + sum_b.log_()


def _entropy(logits_bv: Tensor, normaliser_b: Tensor, shard: VocabularyShard) -> Tensor:
    """Return -sum of p log p over the vocabulary; padding, with p = 0, counts nothing. Overwrites the logits."""
    log_bv = logits_bv.sub_(normaliser_b[:, None])
    entropy_b = -(log_bv.exp() * log_bv.nan_to_num_(neginf=0.0)).sum(dim=1)
    if shard.group is not None:
        dist.all_reduce(entropy_b, group=shard.group)
    return entropy_b


def _label_logits(logits_bv: Tensor, labels_b: Tensor, shard: VocabularyShard) -> Tensor:
    """Return each label's logit [b], which one rank of the group holds."""
    row_b, index_b, here_b = _local_labels(labels_b, logits_bv.shape[1], shard)
    label_b = torch.where(here_b, logits_bv[row_b, index_b], 0.0)
    if shard.group is not None:
        dist.all_reduce(label_b, group=shard.group)
    return label_b


def _local_labels(labels_b: Tensor, entries: int, shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Return row numbers, label columns clamped to this shard, and where the label really lies in it; [b] each."""
    local_b = labels_b - shard.first
    here_b = (local_b >= 0) & (local_b < entries)
    return torch.arange(len(labels_b), device=labels_b.device), local_b.clamp(0, entries - 1), here_b
