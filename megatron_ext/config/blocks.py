"""The kinds of transformer layers, values of `--block`: what distinguishes one family of models from the others.

A new family is a row of `BLOCKS`, its architecture in checkpoint/hf/families.yaml, and names of its parameters in
checkpoint/parameters.py, where the names of the other families do not apply.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Block:
    """What the layers of a family of models are made of; the defaults are Llama's."""

    norm: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    zero_centred_norm: bool = False  # norms multiply by 1 + weight, in fp32
    pre_norm: bool = True  # attention and the MLP read normalized inputs
    post_norm: bool = False  # their outputs are normalized before they are added to the residual stream
    parallel: bool = False  # attention and the MLP read the same input, normalized once, and are added together
    qk_norm: Literal["each_head", "all_heads"] | None = None  # over which numbers queries and keys are normalized
    gated_mlp: bool = True  # the MLP multiplies the activation of a gate by a second product
    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = "silu"
    mlp_kept: int = 3  # tensors of [t, F] that the MLP keeps for its backward pass
    biases: bool = False  # all products of the layers, and routers, have biases
    output_bias: bool = False  # the output matrix has one, too
    whole_width: bool = False  # heads divide the hidden size even if their size is given, as transformers requires
    sinks: bool = False  # every head has an attention sink
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(hidden size)
    only_experts: bool = False  # no layer has a single MLP
    # in Hugging Face's files the experts of a layer are stacked, and local layers have rotary entries of their own
    stacked_experts: bool = False
    local_angles: bool = False
    options: tuple[str, ...] = ()  # options of the model that not all blocks have

    @property
    def pre_mlp_norm(self) -> bool:
        """Whether the MLP's input has a norm of its own."""
        return self.pre_norm and not self.parallel


BLOCKS = {
    "llama": Block(
        options=(
            "add_qkv_bias",
            "qk_layernorm",
            "no_rope_freq",
            "num_experts",
            "moe_router_score_function",
            "moe_shared_expert_intermediate_size",
            "moe_layer_freq",
            "moe_router_enable_expert_bias",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_topk_scaling_factor",
        )
    ),
    "phi": Block(
        norm="LayerNorm",
        parallel=True,
        gated_mlp=False,
        activation="gelu_tanh",
        mlp_kept=2,
        biases=True,
        output_bias=True,
        options=("rotary_percent",),
    ),
    "gemma3": Block(
        zero_centred_norm=True,
        post_norm=True,
        qk_norm="each_head",
        whole_width=True,
        activation="gelu_tanh",
        mlp_kept=5,
        scaled_embedding=True,
        local_angles=True,
        options=("query_pre_attn_scalar",),
    ),
    "olmo3": Block(pre_norm=False, post_norm=True, qk_norm="all_heads", local_angles=True),
    "gpt_oss": Block(
        activation="clamped_silu",
        mlp_kept=8,
        biases=True,
        sinks=True,
        only_experts=True,
        stacked_experts=True,
        options=("num_experts",),
    ),
}


def mlp_width(hidden_size: int, *, gated: bool) -> int:
    """Return Megatron-LM's default for the width inside an MLP: 4 times the model's.

    With a gate it is 8/3 of the model's, rounded down to a multiple of 64, but at least 64.
    """
    if not gated:
        return 4 * hidden_size
    return max(8 * hidden_size // 3 // 64 * 64, 64)
