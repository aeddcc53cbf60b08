"""Megatron-Core's own GPTModel, in the configuration that arguments of Megatron-LM describe."""

import importlib
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.engine import platform

SMALL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "group_query_attention": True, "kv_channels": 8, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6,
    "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 5000,
    "max_position_embeddings": 64, "untie_embeddings_and_output_weights": True, "params_dtype": torch.float32,
}  # fmt: skip
MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "qk_layernorm": True, "moe_layer_freq": 1}
MOE |= {"moe_aux_loss_coeff": 0.01}
LATENT = {"multi_latent_attention": True, "group_query_attention": False, "num_query_groups": 4, "kv_channels": None}
LATENT |= {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
LATENT |= {"qk_layernorm": True, "rotary_scaling_factor": 1.0}
# queries without a latent; Megatron-Core 0.19 then builds no norm for the latent of keys either
FULL_QUERIES: dict[str, Any] = {"q_lora_rank": None}
if find_spec("megatron.core.transformer.mla_qk_norm_config"):
    FULL_QUERIES = {}
YARN = {"rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}


class CausalAttention(torch.nn.Module):
    """In place of Transformer Engine's attention, the only one that Megatron's latent attention can have."""

    def __init__(self, *, softmax_scale: float, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, *qkv: torch.Tensor, **unused: Any) -> torch.Tensor:
        """[s, b, N, H] -> [s, b, N W]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in qkv[:3])
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, scale=self.scale).permute(2, 0, 1, 3).flatten(2)


def model_of(args: dict[str, Any], layout: dict[str, int]) -> Any:
    """Megatron's own GPTModel on this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention

    platform.choose("cpu")
    importlib.reload(rope_utils)  # Megatron's own rotation, which `choose` replaces
    torch.cuda.synchronize = lambda *_: None
    parallel_state.initialize_model_parallel(**layout)
    model_parallel_cuda_manual_seed(1 + dist.get_rank())
    names = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    names += "add_bias_linear qk_layernorm moe_router_topk moe_ffn_hidden_size moe_layer_freq no_rope_freq "
    is_latent = args.get("multi_latent_attention", False)
    latent = [name for name in (*LATENT, *YARN) if name != "group_query_attention"]
    names += " ".join(["rotary_base", *latent] if is_latent else [])
    names += " pipeline_model_parallel_layout" if "pipeline_model_parallel_size" in layout else ""
    transformer_options = {name: args[name] for name in names.split() if name in args} | layout
    transformer_options |= {"num_moe_experts": args.get("num_experts"), "layernorm_epsilon": args["layernorm_epsilon"]}
    transformer_options |= {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "pipeline_dtype": torch.float32,
    }
    transformer_options |= {
        "init_method_std": 0.2,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    transformer_options |= {"moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none"}
    off = "persist_layer_norm bias_activation_fusion masked_softmax_fusion bias_dropout_fusion apply_rope_fusion "
    off += "gradient_accumulation_fusion"
    kind = MLATransformerConfig if is_latent else TransformerConfig
    config = kind(**transformer_options, **dict.fromkeys(off.split(), False))
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if kind is MLATransformerConfig:
        multi_latent_attention.HAVE_TE = False  # it tests for None's types without Transformer Engine
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
    options = {"vocab_size": args.get("padded_vocab_size", 128)}
    options |= {"max_sequence_length": 64, "position_embedding_type": "rope"}
    options |= {"share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"]}
    options |= {"pre_process": parallel_state.is_pipeline_first_stage(), "rotary_base": args["rotary_base"]}
    options |= {"rope_scaling": args.get("use_rope_scaling", False)}
    options |= {"rope_scaling_factor": args.get("rope_scaling_factor", 8.0)}
    options |= {"seq_len_interpolation_factor": args.get("rotary_seq_len_interpolation_factor")}
    model = GPTModel(config, spec, post_process=parallel_state.is_pipeline_last_stage(), **options)
    return model.to(args["params_dtype"]).eval()
