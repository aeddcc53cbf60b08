"""Triton kernels of the loss head: forward reads a block of logits once; backward reads and writes it once.

Each kernel is one launch with one program per token, which loops over the token's logits.

The gradient is written in place of the logits. bf16 is half as wide, so a token's gradient fills the first half of
its row:

    logits    |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |       float32, read left to right
    gradient  |0    |1    |2    |3    |        (free)         |       bf16, each chunk after the read of the same number

Chunk c is written over chunks of logits up to (c + 1) / 2 <= c, for c > 0; chunk 0 is written over itself. One barrier
between the read and the write of a chunk is sufficient: all threads have then read everything up to that chunk.

Without a GPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1 is set before Triton is imported.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # logits per program and iteration: 16 in each of 256 threads
WARPS = 8
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min / 2)  # as in loss.py


@triton.jit
def _statistics_of_token(
    logits, labels, statistics, row_stride, statistics_stride, first,
    ENTRIES: tl.constexpr, WITH_ENTROPY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    label = tl.load(labels + row) - first
    in_shard = (label >= 0) & (label < ENTRIES)
    highest = tl.full((), _LOWEST, tl.float32)
    sums = tl.zeros((CHUNK,), tl.float32)
    moments = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, ENTRIES, CHUNK):
        at = start + tl.arange(0, CHUNK)
        values = tl.load(logits + at, mask=at < ENTRIES, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(values, axis=0))
        drop = highest - higher  # rescale the earlier sums to the new maximum
        below = values - higher
        exponentials = tl.exp(below)
        if WITH_ENTROPY:
            moments = tl.exp(drop) * (moments + drop * sums) + exponentials * tl.maximum(below, _LOWEST)
        sums = tl.exp(drop) * sums + exponentials
        highest = higher
    statistics += row
    tl.store(statistics, highest)
    tl.store(statistics + statistics_stride, tl.sum(sums, axis=0))
    tl.store(statistics + 2 * statistics_stride, tl.load(logits + label, mask=in_shard, other=0.0))
    if WITH_ENTROPY:
        tl.store(statistics + 3 * statistics_stride, tl.sum(moments, axis=0))


@triton.jit
def _gradient_of_token(
    logits, gradient, labels, highest_of, scales, loss_grads, row_stride, gradient_stride, first,
    ENTRIES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    gradient += row * gradient_stride
    label = tl.load(labels + row) - first
    highest = tl.load(highest_of + row)
    scale = tl.load(scales + row)
    loss_grad = tl.load(loss_grads + row)
    for start in range(0, COLUMNS, CHUNK):
        at = start + tl.arange(0, CHUNK)
        values = tl.load(logits + at, mask=at < ENTRIES, other=float("-inf"))
        values = tl.exp(values - highest) * scale
        values = tl.where(at == label, values - loss_grad, values)
        tl.debug_barrier()  # `gradient` shares the memory of `logits`
        tl.store(gradient + at, values.to(gradient.dtype.element_ty), mask=at < COLUMNS)


@torch.library.custom_op("megatron_ext::softmax_statistics", mutates_args=("statistics_kb",))
def softmax_statistics(logits_bv: Tensor, labels_b: Tensor, statistics_kb: Tensor, first: int, entries: int) -> None:
    """Write each token's statistics, as megatron_ext/loss.py defines them, into the rows of float32 [3 or 4, b].

    Args:
        logits_bv: float32, with contiguous rows.
        labels_b: int64, token ids of the whole vocabulary.
        statistics_kb: m, s, l[label], and u if there is a fourth row. Rows are contiguous.
        first: token id of the first column.
        entries: number of columns that are read; the others are padding.
    """
    kinds, tokens = statistics_kb.shape
    if tokens:
        _statistics_of_token[(tokens,)](
            logits_bv,
            labels_b.contiguous(),
            statistics_kb,
            logits_bv.stride(0),
            statistics_kb.stride(0),
            first,
            ENTRIES=entries,
            WITH_ENTROPY=kinds > 3,
            CHUNK=CHUNK,
            num_warps=WARPS,
        )


@torch.library.custom_op("megatron_ext::softmax_gradient", mutates_args=("logits_bv",))
def softmax_gradient(
    logits_bv: Tensor,
    labels_b: Tensor,
    highest_b: Tensor,
    scale_b: Tensor,
    loss_grad_b: Tensor,
    first: int,
    entries: int,
    dtype: torch.dtype,
) -> None:
    """Overwrite logits by scale * exp(logit - highest), minus the label's `loss_grad`; view it with `in_place_of`.

    Args as for `softmax_statistics`; the gradient of padding is 0.

        logits_bv: float32, contiguous.
        highest_b, scale_b, loss_grad_b: float32.
        dtype: of the gradient, float32 or narrower.
    """
    tokens, columns = logits_bv.shape
    if tokens:
        gradient_bv = in_place_of(logits_bv, dtype)
        _gradient_of_token[(tokens,)](
            logits_bv,
            gradient_bv,
            *(x_b.contiguous() for x_b in (labels_b, highest_b, scale_b, loss_grad_b)),  # may be expanded tensors
            logits_bv.stride(0),
            gradient_bv.stride(0),
            first,
            ENTRIES=entries,
            COLUMNS=columns,
            CHUNK=CHUNK,
            num_warps=WARPS,
        )


@softmax_statistics.register_fake
@softmax_gradient.register_fake
def _(*unused: Any) -> None:
    """Do nothing: the outputs are preallocated."""


def in_place_of(logits_bv: Tensor, dtype: torch.dtype) -> Tensor:
    """View the memory of float32 logits as `dtype` [b, v]; rows start at the same addresses."""
    return logits_bv.view(dtype)[:, : logits_bv.shape[1]]
