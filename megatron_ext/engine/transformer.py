"""Translate a run's configuration into Megatron's, with all fused operations that its device and packages support.

Requirements of the fused operations in Megatron-Core 0.16.1 for the inputs used here (format "sbhd", one batch entry of
t tokens):

    SwiGLU              one kernel in forward and one in backward, compiled by torch.compile: needs CUDA and Triton.
                        Only the input of the block is saved, [t, 2F], instead of five tensors of [t, F]; no bias
    rotary angles       Transformer Engine's kernel for "sbhd", one angle per token; otherwise each layer computes cos
                        and sin. The kernel uses int32 indices, so a long micro-batch is rotated without it
    weight gradients    added to their buffer by the matrix product itself: Transformer Engine's layers, or Megatron's
                        own with Apex's extension

The first two support only blocks with SiLU: there are no such kernels for other activation functions, or for rotary
angles of a part of a head; so MLA's angles are not fused.
"""

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_ext import rope
from megatron_ext.attention.backends import select
from megatron_ext.attention.interface import Attend
from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.checks import PLATFORM, broken
from megatron_ext.engine.experts import LoadBalance
from megatron_ext.engine.parallel import model_chunks
from megatron_ext.engine.platform import Platform
from megatron_ext.errors import UserError
from megatron_ext.masks import MaskOptions

COUNTED = 2**31  # index limit of Transformer Engine's rotary kernel

_ACTIVATIONS: dict[str, dict[str, Any]] = {  # Megatron's options
    "silu": {"activation_func": F.silu},
    "gelu_tanh": {"activation_func": functools.partial(F.gelu, approximate="tanh")},
    "clamped_silu": {  # the gate is clamped from above, up on both sides; the product is gate * (up + 1)
        "activation_func": lambda gate: gate * torch.sigmoid(1.702 * gate),
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
    },
}


@dataclass(kw_only=True)
class PackedTransformerConfig(TransformerConfig):
    """Megatron's configuration, extended by what the modules of this package read."""

    packed_model: ModelConfig
    packed_backend: Attend
    packed_masks: MaskOptions  # which layers are local
    packed_balance: LoadBalance


def transformer_config(config: Config, platform: Platform) -> PackedTransformerConfig:
    """Translate a run's configuration into Megatron's, with our attention backend and masks.

    Raises:
        UserError: this platform does not support an option.
    """
    cuda = platform.device.type == "cuda"
    errors = list(broken(PLATFORM, config, cuda=cuda, transformer_engine=platform.transformer_engine))
    if errors:
        raise UserError("\n".join(errors))
    model = config.model
    parallel = config.parallel
    traits = model.traits
    dtype = weight_dtype(config)
    return PackedTransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        add_qkv_bias=model.add_qkv_bias,
        hidden_dropout=model.hidden_dropout,
        multi_latent_attention=model.multi_latent_attention,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        pipeline_model_parallel_layout=parallel.pipeline_model_parallel_layout,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        tp_comm_overlap=parallel.tp_comm_overlap,
        recompute_granularity=parallel.recompute_granularity,
        recompute_modules=list(parallel.recompute_modules) or None,  # None: core_attn
        **_optional(config),
        kv_channels=model.head_size,
        normalization=traits.norm,
        layernorm_epsilon=model.norm_epsilon,
        **_ACTIVATIONS[traits.activation],
        gated_linear_unit=traits.gated_mlp,
        add_bias_linear=traits.biases,
        layernorm_zero_centered_gamma=traits.zero_centred_norm,
        softmax_type="learnable" if model.has_sinks else "vanilla",
        softmax_scale=(model.query_pre_attn_scalar or model.head_size) ** -0.5 * rope.score_factor(model),
        # each rank has a part of their gradients; Megatron sums the parts, unless the weight itself is in parts
        qk_layernorm=model.has_qk_norms and traits.qk_norm != "all_heads",
        attention_dropout=0.0,
        # otherwise Megatron's models set the environment variables of Transformer Engine's own choice of a backend, and
        # raise an error if the user has set one
        attention_backend=None,
        # with batch_p2p_comm the interleaved schedule is silently wrong on gloo
        overlap_p2p_comm=parallel.is_interleaved,
        batch_p2p_comm=not parallel.is_interleaved,
        # True would synchronize the host after each exchange, Megatron's workaround for a bug in old versions of torch
        batch_p2p_sync=False,
        bf16=config.training.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # engine/weights.py sets all values except the vocabulary's padding, which stays 0
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        use_cpu_initialization=platform.device.type == "cpu",
        calculate_per_token_loss=True,  # Megatron sums gradients; `Stepper` divides them once
        **fusions_here(platform, config),
        bias_dropout_fusion=False,
        fp8=config.training.fp8_format,
        fp8_recipe=config.training.fp8_recipe,
        packed_model=model,
        packed_backend=select(
            parallel.attention_backend,
            platform.device,
            dtype,
            max(model.head_size, model.value_size),  # smaller heads of keys are padded
            model.value_size,
            sinks=model.has_sinks,
        ),
        packed_masks=config.mask_options(),
        packed_balance=LoadBalance(config.training.moe_aux_loss_coeff, config.balances_rows, config.data.seq_length),
    )


def weight_dtype(config: Config) -> torch.dtype:
    """Return the dtype of the model's weights and activations."""
    if config.training.bf16:
        return torch.bfloat16
    return torch.float32


def _optional(config: Config) -> dict[str, Any]:
    """Return the options that only some models or layouts set; the others keep Megatron's defaults."""
    model = config.model
    parallel = config.parallel
    options: dict[str, Any] = {}
    if model.num_experts is not None:
        options = _expert_options(config)
    if parallel.recompute_granularity == "full":
        options["recompute_method"] = parallel.recompute_method
        options["recompute_num_layers"] = parallel.recompute_num_layers
    if parallel.is_interleaved:
        options["virtual_pipeline_model_parallel_size"] = model_chunks(parallel, model.num_layers)
    has_rope = [model.has_rope(number) for number in range(1, model.num_layers + 1)]
    if not all(has_rope):  # with a list, each layer would be compiled separately
        options["no_rope_freq"] = [int(not rotates) for rotates in has_rope]
    return options


def _expert_options(config: Config) -> dict[str, Any]:
    model = config.model
    parallel = config.parallel
    routing = {name: value for name, value in vars(model).items() if name.startswith("moe_router_")}
    return routing | {
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_grouped_gemm": parallel.moe_grouped_gemm,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_router_bias_update_rate": config.training.moe_router_bias_update_rate,
        "moe_router_load_balancing_type": "none",  # computed in engine/experts.py instead
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": model.moe_router_topk == 1,  # which Megatron requires then; only the choice counts
        "moe_token_dispatcher_type": "alltoall",  # the others need micro-batches of equal length
        "expert_tensor_parallel_size": parallel.tensor_model_parallel_size,
    }


def fusions_here(platform: Platform, config: Config) -> dict[str, bool]:
    """Return Megatron's options for the fusions available in this process's environment; on a CPU all are off."""
    on_cuda = platform.device.type == "cuda"
    plain = on_cuda and config.model.traits.activation == "silu"
    apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "bias_activation_fusion": plain and find_spec("triton") is not None,
        "apply_rope_fusion": plain and not config.model.multi_latent_attention and platform.transformer_engine,
        "gradient_accumulation_fusion": on_cuda and (platform.transformer_engine or apex),
    }


def rotation_limit(config: Config) -> int:
    """Return how many tokens of a rank's queries, keys and values Transformer Engine's rotary kernel can index."""
    model = config.model
    width = (model.num_attention_heads + 2 * model.num_query_groups) * model.head_size
    return (COUNTED * config.parallel.tensor_model_parallel_size - 1) // width
