"""Matrix products of bf16 operands with float32 results.

A tensor core accumulates in float32; a plain bf16 product then rounds its result. On CUDA these products write their
results in float32 (`out_dtype`). On a CPU the operands are converted to float32 first, which gives the same numbers up
to the order of the additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import register_flop_formula

# Earlier versions reject a float32 total with bf16 operands: https://github.com/pytorch/pytorch/pull/167931
_ADDS_IN_PLACE = TorchVersion(torch.__version__) >= "2.11.0a0"


def operand(matrix: Tensor) -> Tensor:
    """Return the matrix to multiply: on a CPU a float32 copy, otherwise (and in float32) the matrix itself."""
    return matrix.float() if matrix.device.type == "cpu" else matrix


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
    """Add left @ right to the float32 `total`; before torch 2.11 the product is a temporary tensor."""
    if _ADDS_IN_PLACE:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


@_add_wide_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch._check(total.shape == (left.shape[0], right.shape[1]), lambda: f"{total.shape} holds no such product")
    torch._check(left.shape[1] == right.shape[0], lambda: f"{left.shape} and {right.shape} do not multiply")


@register_flop_formula(torch.ops.megatron_ext.add_wide_product)
def _flops(total: Sequence[int], left: Sequence[int], right: Sequence[int], *unused: Any, **also_unused: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
