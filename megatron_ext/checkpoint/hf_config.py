"""The Hugging Face configuration that says the same as ours."""

from __future__ import annotations

from typing import Any

from megatron_ext.config import ModelConfig


def hugging_face_config(model: ModelConfig, vocab_size: int, row_length: int) -> dict[str, Any]:
    """`config.json` of the Llama (or, with QKV biases, Qwen2) that has these shapes.

    Args:
        model: the shapes.
        vocab_size: V, without padding.
        row_length: L, written as `max_position_embeddings`.
    """
    family = "qwen2" if model.add_qkv_bias else "llama"
    config = {
        "architectures": ["Qwen2ForCausalLM" if model.add_qkv_bias else "LlamaForCausalLM"],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": row_length,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
    }
    if family == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    return config
