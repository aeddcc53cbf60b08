"""The arguments of Megatron-LM by the real parser of three versions.

megatron_lm_arguments.json has the repr of each name's default, or of those in 0.16.1, 0.19.0 and d98e8a64, null where a
version does not have the name.
"""

import ast
import json
from pathlib import Path
from typing import Any

VERSIONS = ("0.16.1", "0.19.0", "d98e8a64")
_DEFAULTS = json.loads(Path(__file__).with_name("megatron_lm_arguments.json").read_text(encoding="utf-8"))

# what --use-checkpoint-args of 0.16 to d98e8a64 reads from a checkpoint
_READ = """
add_bias_linear add_position_embedding add_qkv_bias apply_layernorm_1p apply_query_key_layer_scaling
attention_dropout ckpt_format expert_model_parallel_size ffn_hidden_size group_query_attention
heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path hidden_dropout hidden_size kv_channels
mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim max_position_embeddings moe_ffn_hidden_size
moe_grouped_gemm moe_latent_size moe_layer_freq moe_router_enable_expert_bias moe_router_pre_softmax
moe_router_score_function moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_intermediate_size
moe_token_dispatcher_type normalization num_attention_heads num_experts num_layers
num_layers_per_virtual_pipeline_stage num_query_groups padded_vocab_size pipeline_model_parallel_size
position_embedding_type rotary_base rotary_interleaved rotary_percent seq_length spec squared_relu swiglu
tensor_model_parallel_size tiktoken_pattern tokenizer_model tokenizer_type untie_embeddings_and_output_weights
use_rotary_position_embeddings virtual_pipeline_model_parallel_size
"""
READ_FROM_CHECKPOINTS = set(_READ.split())


class Unknown:
    """An object that only its own package could restore."""


def defaults(version: str) -> dict[str, Any]:
    """The namespace of a version without any flag; objects such as enums are `Unknown`."""
    values = {}
    for name, listed in _DEFAULTS.items():
        text = listed[VERSIONS.index(version)] if isinstance(listed, list) else listed
        if text is not None:
            values[name] = Unknown() if text.startswith("<") else ast.literal_eval(text)
    return values
