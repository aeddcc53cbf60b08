"""Define the layers of each block, from Transformer Engine if it is installed, else from Megatron.

llama   x + attention(norm(x)), then x + mlp(norm(x))
phi     x + attention(norm(x)) + mlp(norm(x)), one norm
gemma3  x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))
olmo3   x + norm(attention(x)), then x + norm(mlp(x))

With experts, the mlp of a llama or gpt_oss block is a router and its experts, and shared experts if there are any. With
`multi_latent_attention`, the attention of a llama block is defined in latent_attention.py.

Legend: t tokens, N heads of this rank, H head size, D hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_ext.engine.experts import BalancedRouter, ExpertLayer, expert_output
from megatron_ext.engine.latent_attention import LatentAttention
from megatron_ext.engine.norms import LayerNorm, RMSNorm, ZeroCentredRMSNorm
from megatron_ext.engine.transformer import PackedTransformerConfig

# Megatron's bias-dropout-add: ((output, bias), residual, dropout) -> residual stream
BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class LocalAngles(SelfAttention):
    """Gives local layers their own rotary angles, if the model has two rotary bases."""

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Return attention's output and bias; with two bases the angles are [2 t, 1, 1, H], local layers second."""
        if self.config.packed_model.rotary_base_local is not None:
            rotary_pos_emb = rotary_pos_emb.chunk(2)[int(self.core_attention.local)]
        return super().forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class WholeNorms(LocalAngles):
    """Normalizes queries and keys over all heads together (Olmo 3).

    The norms are not part of the layer's specification, because that needs `qk_layernorm`, under which Megatron sums
    the norms' gradients over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_layernorm = HeadsNorm(config.num_attention_heads, config)
        self.k_layernorm = HeadsNorm(config.num_query_groups, config)


class ParallelLayer(TransformerLayer):
    """Computes attention and the MLP in parallel, both from the same normalized input (Phi)."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the residual stream [t, 1, D] after the layer, and None as the context of cross-attention."""
        normed = self.input_layernorm(hidden_states)
        names = ("attention_mask", "rotary_pos_emb", "packed_seq_params")
        attended = self.self_attention(normed, **{name: kwargs.get(name) for name in names})
        if self.recompute_mlp:  # without the second bias, a leaf that autograd would mistake for the result
            output = tensor_parallel.checkpoint(lambda given: self.mlp(given)[0], False, normed)
            transformed = output, self.mlp.linear_fc2.bias
        else:
            transformed = self.mlp(normed)
        fused = self.config.bias_dropout_fusion
        with self.bias_dropout_add_exec_handler():
            residual = self.self_attn_bda(self.training, fused)(attended, hidden_states, self.hidden_dropout)
            output = self.mlp_bda(self.training, fused)(transformed, residual, self.hidden_dropout)
        return make_viewless_tensor(inp=output, requires_grad=output.requires_grad, keep_graph=True), None


class SandwichLayer(TransformerLayer):
    """Normalizes the outputs of attention and the MLP."""

    def __init__(self, config: TransformerConfig, *args: Any, post_norm: type, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_norm, self.post_mlp_norm = (
            post_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon) for _ in range(2)
        )
        self.self_attn_bda = _normed(self.post_attention_norm, vars(self)["self_attn_bda"])
        self.mlp_bda = _normed(self.post_mlp_norm, vars(self)["mlp_bda"])


def _normed(
    norm: Callable[[Tensor], Tensor], build: Callable[[bool, bool], BiasDropoutAdd]
) -> Callable[[bool, bool], BiasDropoutAdd]:
    """Normalize an output, which has no bias, before it is added to the residual stream."""

    def build_normed(training: bool, fused: bool) -> BiasDropoutAdd:
        add = build(training, fused)

        def add_normed(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            assert output[1] is None
            return add((norm(output[0]), None), residual, dropout)

        return add_normed

    return build_normed


class HeadsNorm(torch.nn.Module):
    """RMSNorm of queries or keys over all heads together (Olmo 3), exact under tensor parallelism.

        y = w x / sqrt(mean(x^2) + eps), the mean over all N H numbers of a token

    A tensor-parallel rank holds N / tp heads of x and w. The ranks sum the squares in forward, and in backward the
    products of x with its gradient. Megatron and Transformer Engine only normalize each head alone.

    `heads` counts the heads of all tensor-parallel ranks.
    """

    def __init__(self, heads: int, config: Any) -> None:
        super().__init__()
        group = get_tensor_model_parallel_group()
        self.group = None
        if group.size() > 1:
            self.group = group
        self.width = heads * config.kv_channels
        self.eps = config.layernorm_epsilon
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
        if group is not None:
            dist.all_reduce(squares_t111, group=group)
        scale_t111 = torch.rsqrt(squares_t111 / width + eps)
        ctx.save_for_backward(x_t1NH, weight_NH, scale_t111)
        ctx.width = width
        ctx.group = group
        return (x_t1NH * scale_t111).mul_(weight_NH).to(x_t1NH.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_t1NH: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_t1NH, weight_NH, scale_t111 = ctx.saved_tensors
        normed_t1NH = x_t1NH * scale_t111
        products_t1NH = grad_t1NH * normed_t1NH
        grad_weight_NH = products_t1NH.sum(dim=(0, 1)).to(weight_NH.dtype)
        along_t111 = products_t1NH.mul_(weight_NH).sum(dim=(-2, -1), keepdim=True)
        if ctx.group is not None:
            dist.all_reduce(along_t111, group=ctx.group)
        del products_t1NH
        grad_x_t1NH = normed_t1NH.mul_(along_t111 / -ctx.width).add_(grad_t1NH * weight_NH.float()).mul_(scale_t111)
        return grad_x_t1NH.to(x_t1NH.dtype), grad_weight_NH, None, None, None


def layer_specs(
    config: PackedTransformerConfig, core_attention: type, vp_stage: int | None, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return the specification of a model chunk.

    Its modules are Transformer Engine's or Megatron's, except for `core_attention` and the classes of this file.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = [
        _layer_spec(config, core_attention, config.packed_model.has_experts(first + number), transformer_engine)
        for number in range(get_num_layers_to_build(config, vp_stage=vp_stage))
    ]
    return TransformerBlockSubmodules(layers, layer_norm=_norm(config, transformer_engine))


def _norm(config: PackedTransformerConfig, transformer_engine: bool) -> type:
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm: type = TENorm
        return norm
    if config.normalization == "LayerNorm":
        return LayerNorm
    if config.layernorm_zero_centered_gamma:
        return ZeroCentredRMSNorm
    return RMSNorm


def _submodules(module: Any) -> Any:
    """Return the submodules of a module's specification, or from Megatron-Core 0.18 on of its `functools.partial`."""
    if isinstance(module, functools.partial):
        return module.keywords["submodules"]
    return module.submodules


def _layer_spec(
    config: PackedTransformerConfig, core_attention: type, experts: bool, transformer_engine: bool
) -> ModuleSpec:
    """Return the specification of a layer with or without experts."""
    norm = _norm(config, transformer_engine)
    traits = config.packed_model.traits
    num_experts = config.num_moe_experts if experts else None
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    else:
        layer = get_gpt_layer_local_spec(num_experts=num_experts, normalization=config.normalization)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.module = LocalAngles
    attention = layer.submodules.self_attention.submodules
    mlp = _submodules(layer.submodules.mlp)
    attention.core_attention = core_attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if experts:
        layer.module = ExpertLayer
        mlp.router = BalancedRouter
        if config.add_bias_linear and not config.moe_grouped_gemm:
            expert = _submodules(mlp.experts)
            expert.linear_fc2 = expert_output(expert.linear_fc2)
    if config.multi_latent_attention:
        layer.submodules.input_layernorm = norm
        column = TEColumnParallelLinear if transformer_engine else attention.linear_qkv
        layer.submodules.self_attention = ModuleSpec(
            module=LatentAttention,
            params={"column": column, "row": attention.linear_proj, "norm": norm, "core_attention": core_attention},
        )
    if traits.parallel:
        layer.module = ParallelLayer
        layer.submodules.input_layernorm = norm
        layer.submodules.pre_mlp_layernorm = IdentityOp
    if traits.qk_norm == "all_heads":
        layer.submodules.self_attention.module = WholeNorms
    if not traits.pre_norm:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    if not traits.pre_mlp_norm and transformer_engine:  # its usual layers contain the norm of their input
        attention.linear_qkv = mlp.linear_fc1 = TEColumnParallelLinear
    if traits.post_norm:
        layer.module = SandwichLayer
        layer.params["post_norm"] = norm
    return layer
