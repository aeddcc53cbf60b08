"""Compute cross-entropy in blocks, without materializing all logits, and the terms of a global batch's loss.

Legend: k kinds of statistics; docs/glossary.md has the other letters.

The loss needs three sums over a token's logits l, and a fourth for the entropy; each can be computed over any part of
the vocabulary:

    m = max l        s = sum exp(l - m)        l[label], 0 if another part has it        u = sum exp(l - m) (l - m)

    log partition = m + log s        -log p(label) = log s + m - l[label]        entropy = log s - u / s
    d(-log p(label)) / dl = exp(l - m) / s - one-hot label             d(log partition) / dl = exp(l - m) / s

A tensor-parallel rank computes them over its part for all tokens, and the parts are merged once: with M the maximum m,
a part's s becomes exp(m - M) s and its u becomes exp(m - M) (u + (m - M) s).

Products of bf16 operands are not rounded. A tensor core accumulates in float32; a plain bf16 product then rounds its
result. On CUDA our products write their results in float32 (`out_dtype`). On a CPU the operands are converted to
float32 first, which gives the same numbers up to the order of the additions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import register_flop_formula

LOWEST = torch.finfo(torch.float32).min / 2  # initial maximum; unlike -inf, it can be subtracted
Number = TypeVar("Number", Tensor, float)
# Earlier versions reject a float32 total with bf16 operands: https://github.com/pytorch/pytorch/pull/167931
_ADDS_IN_PLACE = TorchVersion(torch.__version__) >= "2.11.0a0"
_PARTS = 32  # number of parts in which these versions add a product


@dataclass(frozen=True)
class VocabularyShard:
    """Describes which rows of the output matrix this rank holds."""

    first: int  # token id of the first row
    size: int  # V, the vocabulary size without padding; padding rows never enter the softmax
    group: dist.ProcessGroup | None = None  # the tensor-parallel group that shares the rows; None if one rank has all

    def real(self, rows: int) -> int:
        """Return the number of this rank's rows that are not padding."""
        return min(max(self.size - self.first, 0), rows)


@dataclass(frozen=True)
class TokenLosses:
    """Per-token results of the loss head; float32 [t] each, the same on every tensor-parallel rank."""

    cross_entropy_t: Tensor  # -log p(label), with gradient
    log_partition_t: Tensor  # log of the sum of the exponentiated logits, with gradient
    # entropy of the predicted distribution, in nats, without gradient; None unless requested
    entropy_t: Tensor | None = None


class LossTerms(NamedTuple, Generic[Number]):
    """Sums over tokens: float64 scalars of a micro-batch on one rank, or floats of the whole global batch."""

    weighted_sum: Number  # sum of weight * loss (and of the z-loss); its quotient by the denominator is minimized
    loss_sum: Number  # sum of the unweighted losses of the trained tokens
    token_count: Number  # number of trained tokens
    weight_sum: Number  # sum of their weights
    weight_square_sum: Number  # sum of the squares of their weights
    zero_count: Number  # number of trained tokens with weight 0
    score_sum: Number  # sum of the scores from which the weights were computed


def loss_terms(
    losses: TokenLosses, weights_t: Tensor, trained_t: Tensor, z_loss: float = 0.0, scores_t: Tensor | None = None
) -> tuple[Tensor, LossTerms[Tensor]]:
    """Sum per-token losses.

    Args:
        weights_t: float32 [t], multiplied with the cross-entropies; never a mask.
        trained_t: bool [t]; other tokens count in no sum, whatever their loss (including NaN).
        scores_t: float [t], the scores of the weights; only summed for the records.
        z_loss: coefficient of log_partition^2, which is not weighted (arXiv 2204.02311, section 5).

    Returns:
        The float32 scalar to run backward from, and the detached terms.
    """
    # multiplying by 0 would keep the NaN of an untrained token
    kept = torch.where(trained_t, losses.cross_entropy_t, 0.0)
    weights = torch.where(trained_t, weights_t, 0.0)
    weighted = kept * weights
    if z_loss:
        weighted = weighted + z_loss * torch.where(trained_t, losses.log_partition_t, 0.0).square()
    exact = weights.double()
    if scores_t is None:
        scores_t = torch.zeros_like(exact)
    terms = LossTerms(
        weighted_sum=weighted.detach().sum(dtype=torch.float64),
        loss_sum=kept.detach().sum(dtype=torch.float64),
        token_count=trained_t.sum(dtype=torch.float64),
        weight_sum=exact.sum(),
        weight_square_sum=exact.square().sum(),
        zero_count=(trained_t & (weights == 0)).sum(dtype=torch.float64),
        score_sum=torch.where(trained_t, scores_t, 0.0).sum(dtype=torch.float64),
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
    weight_grad_vD: Tensor | None = None,
    fused: bool | None = None,
) -> TokenLosses:
    """Compute each token's -log p(label), and its gradient, in blocks of tokens.

    Forward keeps the statistics of each token's logits; backward recomputes each block's logits. Logits are float32,
    and so are the sums of the weight's gradient. On CUDA, memory beyond the arguments and their gradients is one block
    of logits, float32 [block_tokens, v], `adding_bytes`, and without `weight_grad_vD` the weight's gradient in float32.

    In plain torch without tensor parallelism, the last block of forward is kept for backward, which starts with it: a
    row of one block takes three products instead of four, with the same results.

    Args:
        hidden_tD: the last layer's output, the same on every rank of `shard.group`.
        weight_vD: this rank's rows of the output matrix.
        labels_t: int64 [t], 0 <= label < shard.size.
        block_tokens: b, number of tokens whose logits exist at one time.
        weight_grad_vD: float32 buffer to which backward adds the weight's gradient; autograd then gets none, because
            it would copy even expanded zeros to a tensor [v, D]. None: autograd gets the gradient.
        fused: whether to use the kernels of megatron_ext/loss_kernels.py; None: on CUDA.

    Returns:
        The losses, the same on every rank of the group. The gradient of `hidden_tD` is this rank's part: the
        caller sums it over the group.
    """
    if fused is None:
        fused = hidden_tD.is_cuda
    cross_entropy_t, log_partition_t, entropy_t = _BlockedCrossEntropy.apply(
        hidden_tD, weight_vD, labels_t, shard, block_tokens, entropy, weight_grad_vD, fused
    )
    return TokenLosses(cross_entropy_t, log_partition_t, entropy_t if entropy else None)


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
        weight_grad_vD: Tensor | None,
        fused: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics_kt = hidden_tD.new_empty((3 + entropy, len(labels_t)), dtype=torch.float32)
        buffer_bv = _buffer(hidden_tD, weight_vD, block)
        factor_vD = operand(weight_vD)
        for at in reversed(_blocks(hidden_tD, block)):
            logits_bv = buffer_bv[: at.stop - at.start]
            product_into(logits_bv, operand(hidden_tD[at]), factor_vD.T)
            _measure(logits_bv, labels_t[at], shard, statistics_kt[:, at], fused)
        # In plain torch without tensor parallelism, the last block holds exp(l - m) and is reused by backward.
        ctx.exponential_bv = None
        if shard.group is not None:
            _combine_shards(statistics_kt, shard.group)
        elif not (fused or entropy):
            ctx.exponential_bv = buffer_bv
        highest_t, sum_t, label_t = statistics_kt[:3]
        log_t = sum_t.log()
        entropy_t = log_t.new_empty(0)
        if entropy:
            entropy_t = log_t - statistics_kt[3] / sum_t
        ctx.save_for_backward(hidden_tD, weight_vD, labels_t, highest_t, sum_t)
        ctx.shard = shard
        ctx.block = block
        ctx.weight_grad_vD = weight_grad_vD
        ctx.fused = fused
        ctx.mark_non_differentiable(entropy_t)
        return log_t + (highest_t - label_t), log_t + highest_t, entropy_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        loss_grad_t, partition_grad_t, _ = grads
        hidden_tD, weight_vD, labels_t, highest_t, sum_t = ctx.saved_tensors
        scale_t = (loss_grad_t + partition_grad_t) / sum_t
        grad_hidden_tD = torch.empty_like(hidden_tD)
        total_vD = ctx.weight_grad_vD
        if total_vD is None:
            total_vD = torch.zeros_like(weight_vD, dtype=torch.float32)
        shard = ctx.shard
        entries = shard.real(len(weight_vD))
        factor_vD = operand(weight_vD)
        dtype = factor_vD.dtype
        buffer_bv = ctx.exponential_bv
        ctx.exponential_bv = None  # overwritten here: a second backward pass recomputes all blocks
        is_exponential = buffer_bv is not None  # whether it holds exp(l - m) of the block that comes first
        if buffer_bv is None:
            buffer_bv = _buffer(hidden_tD, weight_vD, ctx.block)
        for at in _blocks(hidden_tD, ctx.block):
            hidden_bD = operand(hidden_tD[at])
            logits_bv = buffer_bv[: at.stop - at.start]
            if not is_exponential:
                product_into(logits_bv, hidden_bD, factor_vD.T)
            # scale * exp(l - m), minus the label's gradient at the label; written over the logits
            labels_b, highest_b, scale_b, loss_grad_b = (x_t[at] for x_t in (labels_t, highest_t, scale_t, loss_grad_t))
            if ctx.fused:
                from megatron_ext.loss_kernels import in_place_of, softmax_gradient

                softmax_gradient(logits_bv, labels_b, highest_b, scale_b, loss_grad_b, shard.first, entries, dtype)
                grad_bv = in_place_of(logits_bv, dtype)
            else:
                if not is_exponential:
                    logits_bv[:, entries:] = -torch.inf
                    logits_bv.sub_(highest_b[:, None]).exp_()
                logits_bv.mul_(scale_b[:, None])
                column_b, in_shard_b = _columns(labels_b, shard, logits_bv.shape[1])
                logits_bv.scatter_add_(1, column_b[:, None], torch.where(in_shard_b, -loss_grad_b, 0.0)[:, None])
                grad_bv = logits_bv.to(dtype)
            is_exponential = False
            product_into(grad_hidden_tD[at], grad_bv, factor_vD)
            add_product(total_vD, grad_bv.T, hidden_bD)
        grad_weight_vD = None
        if ctx.weight_grad_vD is None:
            grad_weight_vD = total_vD.to(weight_vD.dtype)
        return grad_hidden_tD, grad_weight_vD, *[None] * 6


def _blocks(hidden_tD: Tensor, block: int) -> list[slice]:
    tokens = len(hidden_tD)
    return [slice(start, min(start + block, tokens)) for start in range(0, tokens, block)]


def _buffer(hidden_tD: Tensor, weight_vD: Tensor, block: int) -> Tensor:
    """Allocate the logits of one block, float32 [b, v], reused by all blocks."""
    return hidden_tD.new_empty((min(block, len(hidden_tD)), len(weight_vD)), dtype=torch.float32)


def _measure(logits_bv: Tensor, labels_b: Tensor, shard: VocabularyShard, statistics_kb: Tensor, fused: bool) -> None:
    """Write m, s, l[label] and, if there is a row for it, u of these logits.

    Plain torch overwrites the logits with exp(l - m) unless u is requested.
    """
    entries = shard.real(logits_bv.shape[1])
    if fused:
        from megatron_ext.loss_kernels import softmax_statistics

        softmax_statistics(logits_bv, labels_b, statistics_kb, shard.first, entries)
        return
    logits_bv[:, entries:] = -torch.inf  # vocabulary padding; exp gives 0
    column_b, in_shard_b = _columns(labels_b, shard, logits_bv.shape[1])
    statistics_kb[0] = highest_b = logits_bv.amax(dim=1).clamp_(min=LOWEST)
    statistics_kb[2] = torch.where(in_shard_b, logits_bv.gather(1, column_b[:, None])[:, 0], 0.0)
    below_bv = logits_bv.sub_(highest_b[:, None])
    if len(statistics_kb) == 3:
        statistics_kb[1] = below_bv.exp_().sum(dim=1)
        return
    exponential_bv = below_bv.exp()
    statistics_kb[1] = exponential_bv.sum(dim=1)
    statistics_kb[3] = exponential_bv.mul_(below_bv.clamp_(min=LOWEST)).sum(dim=1)  # 0 times -inf is NaN


def _combine_shards(statistics_kt: Tensor, group: dist.ProcessGroup) -> None:
    """Reduce the statistics of this rank's part of the vocabulary to the whole vocabulary's, in two reductions."""
    highest_t = statistics_kt[0].clone()
    dist.all_reduce(highest_t, op=dist.ReduceOp.MAX, group=group)
    drop_t = statistics_kt[0] - highest_t
    if len(statistics_kt) > 3:
        statistics_kt[3] = (statistics_kt[3] + drop_t * statistics_kt[1]) * drop_t.exp()
    statistics_kt[1] *= drop_t.exp()
    dist.all_reduce(statistics_kt[1:], group=group)
    statistics_kt[0] = highest_t


def _columns(labels_b: Tensor, shard: VocabularyShard, columns: int) -> tuple[Tensor, Tensor]:
    """Return each label's column [b], clamped to this shard's, and whether the label is in this shard."""
    local_b = labels_b - shard.first
    return local_b.clamp(0, columns - 1), (local_b >= 0) & (local_b < columns)


def operand(matrix: Tensor) -> Tensor:
    """Return the matrix to multiply: on a CPU a float32 copy, otherwise (and in float32) the matrix itself."""
    if matrix.device.type == "cpu":
        return matrix.float()
    return matrix


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write left @ right into `out`; between bf16 and float32 its dtype may differ from the operands'."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif left.dtype == torch.float32:
        out.copy_(left @ right)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, of the operands' dtype or float32, without a temporary for the product."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        _add_wide_product(total, left, right)


# A custom operator, because torch's in-place form has no working fake implementation and breaks torch's FLOP counter.
@torch.library.custom_op("megatron_ext::add_wide_product", mutates_args=("total",))
def _add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the float32 `total`; before torch 2.11 with temporary products of some rows."""
    if _ADDS_IN_PLACE:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        return
    for part, left_part in zip(total.chunk(_PARTS), left.chunk(_PARTS), strict=True):
        part += torch.mm(left_part, right, out_dtype=total.dtype)


def adding_bytes(rows: int, width: int) -> int:
    """Return the temporary memory of adding a wide product to a total [rows, width]."""
    if _ADDS_IN_PLACE:
        return 0
    return 4 * width * -(-rows // _PARTS)


@_add_wide_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch._check(total.shape == (left.shape[0], right.shape[1]), lambda: f"{total.shape} holds no such product")
    torch._check(left.shape[1] == right.shape[0], lambda: f"{left.shape} and {right.shape} do not multiply")


@register_flop_formula(torch.ops.megatron_ext.add_wide_product)
def _flops(total: Sequence[int], left: Sequence[int], right: Sequence[int], *unused: Any, **also_unused: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
