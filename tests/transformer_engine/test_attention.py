"""`te_thd` through Transformer Engine's choice of a kernel, its fused one or FlashAttention 2, against the reference.

The functions that take a rank run on the emulated machine, where the kernels are exact but for the rounding of bf16.
"""

import os
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_ext.attention import adapters, reference
from megatron_ext.attention.backends import BACKENDS, PerCall
from megatron_ext.attention.interface import AttentionCall
from megatron_ext.context_parallel.exchange import QKV
from tests.attention.kernels import Lengths, call_of
from tests.launcher import call
from tests.transformer_engine import SERVER
from tests.transformer_engine.extension import calls

TOLERANCE = 1e-2
LENGTHS: dict[str, Lengths] = {
    "one": [(40, 40)],
    "equal": [(5, 5), (17, 17), (1, 1), (9, 9)],
    "earlier keys": [(5, 9), (17, 17), (1, 30), (9, 12)],
    "empty queries": [(5, 5), (0, 7), (9, 12)],
    "empty segment": [(5, 5), (0, 0), (9, 9)],
    "longest in two segments": [(30, 30), (2, 40)],
}
SIZES = [(16, 16), (64, 64), (256, 256), (24, 16), (192, 128)]  # of key and value heads
KERNELS = {"fused": "1", "flash": "0"}


def inputs_of(segments: AttentionCall, groups: int, sizes: tuple[int, int], sinks: bool) -> list[Tensor]:
    """Queries, keys, values and the outputs' gradient, which is not contiguous; sinks."""
    torch.manual_seed(0)
    t, u = int(segments.cu_seqlens_q[-1]), int(segments.cu_seqlens_kv[-1])
    size, width = sizes
    shapes = [(t, 4, size), (u, groups, size), (u, groups, width), (4, t, width), *([(4,)] if sinks else [])]
    query, key, value, grad, *sink = (torch.randn(shape).bfloat16() for shape in shapes)
    return [query, key, value, grad.transpose(0, 1), *sink]


def results(attend: Callable[..., Tensor], inputs: list[Tensor], segments: AttentionCall) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], *inputs[4:])]
    out = attend(QKV(*leaves), segments, 0.3)
    return [out, *torch.autograd.grad(out, leaves, inputs[3])]


def error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference, by the largest number of the tensor."""
    pairs = [(a.float(), b) for a, b in zip(actual, exact, strict=True) if b.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs)


def exactly(inputs: list[Tensor], segments: AttentionCall) -> list[Tensor]:
    return results(reference.attend, [x.float() for x in inputs], segments)


def largest_errors(rank: int, kernel: str, sinks: bool) -> dict[str, float] | str:
    """The largest error over lengths and windows, by heads; and the smallest one of controls with another window.

    Or why the version has no such kernel.
    """
    objection = BACKENDS["te_thd"].objection(torch.device("cuda"), torch.bfloat16, 64, sinks=sinks)
    if objection:
        return objection
    errors: dict[str, float] = {}
    with patch.dict(os.environ, NVTE_FUSED_ATTN=KERNELS[kernel]):
        heads = [*((2, sizes) for sizes in SIZES), (4, (64, 64)), (1, (64, 64))]
        for (groups, sizes), lengths, left_window in product(heads, LENGTHS.values(), (None, 0, 6)):
            segments = call_of(lengths, left_window)
            inputs = inputs_of(segments, groups, sizes, sinks)
            actual = results(PerCall(("te_thd",)), inputs, segments)
            name = f"{groups} key heads of {sizes}"
            errors[name] = max(errors.get(name, 0), error(actual, exactly(inputs, segments)))
            if left_window:
                wrong = error(actual, exactly(inputs, call_of(lengths, left_window - 1)))
                errors["control"] = min(errors.get("control", wrong), wrong)
    assert (calls["fused_attn_fwd"] > 0) == (kernel == "fused")
    return errors


@pytest.mark.parametrize(("kernel", "sinks"), [("fused", False), ("fused", True), ("flash", False)])
def test_te_thd_equals_the_reference(kernel: str, sinks: bool) -> None:
    (errors,) = call(largest_errors, 1, kernel, sinks, server=SERVER)
    if isinstance(errors, str):
        pytest.skip(errors)
    print({name: f"{value:.1e}" for name, value in errors.items()})
    assert errors.pop("control") > 10 * TOLERANCE
    assert max(errors.values()) <= TOLERANCE, errors


VIEWS = {
    "rows of longer tensors": lambda x: torch.cat((torch.full_like(x[:3], 9.0), x))[3:],
    "heads of wider tensors": lambda x: torch.cat((torch.full_like(x, 9.0), x), dim=1)[:, x.shape[1] :],
}


def error_of_views(rank: int, kernel: str, view: str) -> float:
    segments = call_of(LENGTHS["equal"])
    inputs = inputs_of(segments, 2, (64, 64), sinks=False)
    with patch.dict(os.environ, NVTE_FUSED_ATTN=KERNELS[kernel]):
        out = adapters.te_thd(QKV(*(VIEWS[view](x) for x in inputs[:3])), segments, 0.3)
    return error([out], exactly(inputs, segments)[:1])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_te_thd_takes_views(kernel: str, view: str) -> None:
    """Pieces that need no other rank's keys are a view of its rows; an exchange in parts takes some of the heads."""
    assert call(error_of_views, 1, kernel, view, server=SERVER)[0] <= TOLERANCE


def attend_without_kernels(rank: int) -> bool:
    """Return whether a call fails that has no kernel but Transformer Engine's unfused path, which the user allows."""
    users = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "1", "NVTE_FLASH_ATTN_V4": "1"}
    segments = call_of(LENGTHS["equal"])
    inputs = inputs_of(segments, 2, (64, 64), sinks=False)
    with patch.dict(os.environ, users):
        before = dict(os.environ)
        try:
            adapters.te_thd(QKV(*inputs[:3]), segments, 0.3)
        except ValueError:
            assert dict(os.environ) == before
            return True
    return False


def test_te_may_not_fall_back() -> None:
    """Its unfused path is off during a call, whatever the user set, and only then."""
    assert call(attend_without_kernels, 1, server=SERVER) == [True]
