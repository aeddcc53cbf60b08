"""The layers of each block: Transformer Engine's where it is, else Megatron's own.

llama   x + attention(norm(x)), then x + mlp(norm(x))
phi     x + attention(norm(x)) + mlp(norm(x)), one norm
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_ext.engine.compat import LayerNorm, RMSNorm


class ParallelLayer(TransformerLayer):
    """Computes attention and the MLP side by side, both of the same normalised input (Phi)."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the residual stream [t, 1, D] after the layer, and no context: nothing else is attended to.

        Args:
            hidden_states: the residual stream before it.
            kwargs: what Megatron's block hands to every layer; the attention's part of it is passed on.
        """
        normed = self.input_layernorm(hidden_states)
        names = ("attention_mask", "rotary_pos_emb", "packed_seq_params")
        attended = self.self_attention(normed, **{name: kwargs.get(name) for name in names})
        transformed = tensor_parallel.checkpoint(self.mlp, False, normed) if self.recompute_mlp else self.mlp(normed)
        fused = self.config.bias_dropout_fusion
        with self.bias_dropout_add_exec_handler():
            residual = self.self_attn_bda(self.training, fused)(attended, hidden_states, self.hidden_dropout)
            output = self.mlp_bda(self.training, fused)(transformed, residual, self.hidden_dropout)
        return make_viewless_tensor(inp=output, requires_grad=output.requires_grad, keep_graph=True), None


def layer_spec(
    config: TransformerConfig, block: str, core_attention: ModuleSpec, *, transformer_engine: bool
) -> tuple[ModuleSpec, type]:
    """Describe a layer to Megatron, and the norm that follows the last one.

    Args:
        config: Megatron's, of the whole model.
        block: of our ModelConfig.
        core_attention: what computes attention.
        transformer_engine: whether its modules are to be taken.
    """
    norm: type
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(), TENorm
    else:
        norm = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
        layer = get_gpt_layer_local_spec(normalization=config.normalization)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = core_attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if block == "phi":
        layer.module = ParallelLayer
        layer.submodules.input_layernorm, layer.submodules.pre_mlp_layernorm = norm, IdentityOp
        if (
            transformer_engine
        ):  # its fused norms would be two; a checkpoint has the one under the fused name all the same
            attention.linear_qkv = layer.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
            layer.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    return layer, norm
