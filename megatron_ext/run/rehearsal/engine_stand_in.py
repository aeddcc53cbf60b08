"""Modules in Transformer Engine's place, which fake tensors can go through: its extension takes none.

Megatron's own wrappers are built over them, so that names, shapes and types of parameters are the real ones. A module
keeps for its backward pass what that of Transformer Engine 2.11 keeps in bf16, and calls torch where it calls a kernel:

    Linear, LayerNormLinear   what enters the norm and the product, as this rank has it; under sequence parallelism both
                              passes gather it anew, and free it. Gradients of weights are added to Megatron's buffer
                              by the product; what autograd gets in their stead are tensors shared by all of a shape
    GroupedLinear             the experts' tokens, of all experts in one
    RMSNorm, LayerNorm        what enters, and its statistics
    rotary angles             the angles alone
    general_gemm              nothing; float32 results of bf16 operands, which the router takes

Without them Megatron takes what it takes without Transformer Engine: optimizers, dropout, the permutation of tokens.
Workspaces of kernels are not counted (cuBLAS's of each stream, partial sums of a norm's weight gradient).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.errors import UserError
from megatron_ext.products import add_product, product_into

VERSION = "2.11.0"  # whose modules are stood in for
_unread: dict[tuple[torch.Size, torch.dtype], Tensor] = {}  # gradients that nobody reads, as long as the process lives


class _Product(torch.autograd.Function):
    """Multiplies x [..., in] by a weight [out, in], and sends what tensor-parallel ranks share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _Parallel) -> Tensor:
        """Return [..., out]."""
        ctx.layer, ctx.shape = layer, x.shape
        own = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(own, weight)
        out = (layer.gathered(own) if layer.is_column else own) @ weight.t()
        if layer.is_row:
            out = layer.reduced(out)
        return out.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x, and of the weight where Megatron has no buffer for it."""
        layer, (own, weight) = ctx.layer, ctx.saved_tensors
        out_gradient = gradients[0].reshape(-1, weight.shape[0])
        if layer.is_row:
            out_gradient = layer.gathered(out_gradient)
        x = layer.gathered(own) if layer.is_column else own
        gradient = out_gradient @ weight
        if layer.is_column:
            gradient = layer.reduced(gradient)
        return gradient.view(ctx.shape), _weight_gradient(layer.fuses, weight, out_gradient, x), None


class _GroupedProduct(torch.autograd.Function):
    """Multiplies the tokens of each expert, one after the other in x [t, in], by a weight of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], fuses: bool, *weights: Tensor) -> Tensor:
        """Return [t, out]."""
        ctx.counts, ctx.fuses = counts, fuses
        ctx.save_for_backward(x, *weights)
        out = x.new_empty(len(x), weights[0].shape[0])
        for weight, tokens, made in zip(weights, x.split(counts), out.split(counts), strict=True):
            torch.mm(tokens, weight.t(), out=made)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x, and of each weight where Megatron has no buffer for it."""
        x, *weights = ctx.saved_tensors
        out_gradient, gradient = gradients[0].contiguous(), torch.empty_like(x)
        parts = list(zip(weights, x.split(ctx.counts), out_gradient.split(ctx.counts), strict=True))
        for (weight, _, part), made in zip(parts, gradient.split(ctx.counts), strict=True):
            torch.mm(part, weight, out=made)
        of_weights = [_weight_gradient(ctx.fuses, weight, part, tokens) for weight, tokens, part in parts]
        return gradient, None, None, *of_weights


def _weight_gradient(fuses: bool, weight: Tensor, out_gradient: Tensor, x: Tensor) -> Tensor:
    """Add the gradient of a weight to Megatron's buffer and return a tensor that nobody reads; or return it."""
    if not fuses:
        return out_gradient.t() @ x
    named: Any = weight
    add_product(named.main_grad, out_gradient.t(), x)
    named.grad_added_to_main_grad = True
    key = weight.shape, weight.dtype
    if key not in _unread:
        _unread[key] = torch.empty_like(weight)
    return _unread[key].detach()


class _Norm(torch.autograd.Function):
    """Normalises the last axis of x; a weight around 0 is added to 1 inside the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return a tensor of x's shape."""
        if bias is None:
            out, statistics = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
            ctx.save_for_backward(x, weight, statistics)
        else:
            out, mean, statistics = torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, eps)
            ctx.save_for_backward(x, weight, statistics, bias, mean)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of x, weight and bias."""
        x, weight, statistics, *others = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        if not others:
            of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(
                gradient, x, weight.shape, statistics, weight, (True, True)
            )
            return of_x, of_weight, None, None
        bias, mean = others
        return *torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, mean, statistics, weight, bias, (True, True, True)
        ), None  # fmt: skip


class _Angles(torch.autograd.Function):
    """Turns x by angles in one kernel: keeps the angles alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        """Return a tensor of x's shape."""
        ctx.save_for_backward(angles)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x."""
        return torch.empty_like(gradients[0], memory_format=torch.contiguous_format), None


class _Normed(nn.Module):
    """Holds a norm's weight, and for LayerNorm a bias, under the names that start with `prefix`."""

    def add_norm(self, prefix: str, size: int, normalization: str, sequence_parallel: bool, **place: Any) -> None:
        """Make the parameters."""
        for name in ("weight", "bias") if normalization == "LayerNorm" else ("weight",):
            parameter: Any = nn.Parameter(torch.empty(size, **place))
            parameter.sequence_parallel = sequence_parallel
            self.register_parameter(f"{prefix}{name}", parameter)

    def norm(self, prefix: str, x: Tensor, eps: float) -> Tensor:
        """Return x normalised."""
        found = _Norm.apply(x, getattr(self, f"{prefix}weight"), getattr(self, f"{prefix}bias", None), eps)
        assert isinstance(found, Tensor)
        return found


class LayerNorm(_Normed):
    """Stands in for te.pytorch.LayerNorm."""

    kind = "LayerNorm"

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.add_norm("", hidden_size, self.kind, sequence_parallel, dtype=params_dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised."""
        return self.norm("", x, self.eps)


class RMSNorm(LayerNorm):
    """Stands in for te.pytorch.RMSNorm."""

    kind = "RMSNorm"


class _Parallel(_Normed):
    """Holds a weight of which each tensor-parallel rank has some rows, some columns, or all."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: dist.ProcessGroup | None,
        tp_size: int,
        get_rng_state_tracker: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.is_column, self.is_row = parallel_mode == "column", parallel_mode == "row"
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.fuses, self.use_bias, self.return_bias = fuse_wgrad_accumulation, bias, return_bias
        rows = out_features // (tp_size if self.is_column else 1)
        columns = in_features // (tp_size if self.is_row else 1)
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
        _mark(self.weight, dim=1 if self.is_row else 0)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, dtype=params_dtype, device=device))
            if self.is_row:
                self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
            elif self.is_column:
                _mark(self.bias, dim=0)

    def multiply(self, x: Tensor) -> Any:
        """Return the product and what it is to be added to, or their sum alone."""
        out = _Product.apply(x, self.weight, self)
        if not self.use_bias:
            return out
        return (out, self.bias) if self.return_bias else out + self.bias

    def gathered(self, part: Tensor) -> Tensor:
        """Return the rows of all tensor-parallel ranks, under sequence parallelism."""
        if not self.sequence_parallel:
            return part
        whole = part.new_empty(len(part) * self.tp_size, *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self.tp_group)
        return whole

    def reduced(self, whole: Tensor) -> Tensor:
        """Add up over tensor-parallel ranks; under sequence parallelism return this rank's rows."""
        if self.tp_size == 1:
            return whole
        if not self.sequence_parallel:
            dist.all_reduce(whole, group=self.tp_group)
            return whole
        part = whole.new_empty(len(whole) // self.tp_size, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=self.tp_group)
        return part


def _mark(parameter: Any, dim: int) -> None:
    """Say along which axis a parameter is cut, as Megatron does."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class Linear(_Parallel):
    """Stands in for te.pytorch.Linear."""

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Return the product, and the bias where it is to be added later."""
        return self.multiply(x)


class LayerNormLinear(_Parallel):
    """Stands in for te.pytorch.LayerNormLinear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert not return_layernorm_output
        self.eps = eps
        place = {"dtype": options["params_dtype"], "device": options["device"]}
        self.add_norm("layer_norm_", in_features, normalization, self.sequence_parallel, **place)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Return the product with what is normalised, and the bias where it is to be added later."""
        return self.multiply(self.norm("layer_norm_", x, self.eps))


class GroupedLinear(nn.Module):
    """Stands in for te.pytorch.GroupedLinear."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        fuse_wgrad_accumulation: bool,
        tp_size: int,
        bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        **unused: Any,  # groups and buffers for what the dispatcher sends instead
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.fuses, self.use_bias = num_gemms, fuse_wgrad_accumulation, bias
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype, device=device))
            _mark(weight, dim=1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        """Return the product of each expert's tokens."""
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return _GroupedProduct.apply(x, m_splits, self.fuses, *weights)


class DotProductAttention(nn.Module):
    """Stands where te.pytorch.DotProductAttention is named; a rehearsal attends by other kernels.

    Raises:
        UserError: it is to attend.
    """

    def __init__(self, *unused: Any, **also_unused: Any) -> None:
        raise UserError("attention_backend: got te_thd, which no rehearsal has a stand-in for; leave it to auto")


def apply_rotary_pos_emb(x: Tensor, angles: Tensor, **options: Any) -> Any:
    """Stand in for te.pytorch.attention.rope.apply_rotary_pos_emb."""
    return _Angles.apply(x, angles)


def general_gemm(
    first: Tensor,
    second: Tensor,
    *,
    layout: str,
    out_dtype: torch.dtype | None = None,
    bias: None = None,
    **unused: Any,
) -> list[Any]:
    """Stand in for te.pytorch.cpp_extensions.general_gemm: "TN" is second @ first^T, as its operands are by columns."""
    assert bias is None
    left = second.t() if layout[1] == "T" else second
    right = first.t() if layout[0] == "T" else first
    out = left.new_empty(left.shape[0], right.shape[1], dtype=out_dtype or left.dtype)
    product_into(out, left, right)
    return [out, None, None, None]


class FP8GlobalStateManager:
    """Says that nothing is quantised."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False."""
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        """Return no recipe."""


@contextlib.contextmanager
def _nothing(*unused: Any, **also_unused: Any) -> Any:
    """Enter a context that changes nothing."""
    yield


def _unused(name: str) -> type:
    """Return a class that Megatron names as it is imported, and makes no instance of here."""
    return type(name, (), {})


def _routing(*unused: Any, **also_unused: Any) -> Any:
    raise AssertionError("Megatron asks for fused routing under an option of its own alone")


MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": {name: _unused(name) for name in ("DelayedScaling", "Format")},
    "pytorch": {
        one.__name__: one for one in (Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm, DotProductAttention)
    },
    "pytorch.attention": {},
    "pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    "pytorch.cpp_extensions": {"general_gemm": general_gemm},
    "pytorch.distributed": {
        "CudaRNGStatesTracker": _unused("CudaRNGStatesTracker"), "activation_recompute_forward": _nothing,
    },
    "pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": _nothing},
    "pytorch.module": {},
    "pytorch.module.base": {"get_workspace": lambda: None},
    "pytorch.ops": {name: _unused(name) for name in ("Sequential", "FusibleOperation")},
    "pytorch.router": dict.fromkeys(
        ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"), _routing
    ),
    "pytorch.tensor": {"QuantizedTensor": _unused("QuantizedTensor")},
}  # fmt: skip


def install() -> None:
    """Put the stand-ins where Megatron imports Transformer Engine from."""
    for path, contents in MODULES.items():
        name = f"transformer_engine.{path}".rstrip(".")
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
