"""Model sizes by exact name: the papers' models, public ones, and tiny ones for tests and demos."""

from __future__ import annotations

from typing import Any

_SKYLADDER: dict[str, Any] = {"vocab_size": 32000, "norm_epsilon": 1e-5}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "norm_epsilon": 1e-6,
    "num_query_groups": 8,
    "kv_channels": 128,
    "rotary_base": 1_000_000.0,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": False,
}
_LLAMA32: dict[str, Any] = {
    "vocab_size": 128256,
    "norm_epsilon": 1e-5,
    "ffn_hidden_size": 8192,
    "num_query_groups": 8,
    "rotary_base": 500_000.0,
    "rope_scaling": "llama3",
    "rope_scaling_factor": 32.0,
    "rope_original_length": 8192,
    "untie_embeddings_and_output_weights": False,
}

PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2503.15450, Tables 11 and 12
    "120M": _SKYLADDER
    | {
        "num_layers": 12,
        "hidden_size": 768,
        "ffn_hidden_size": 2048,
        "num_attention_heads": 12,
        "num_query_groups": 1,
        "rotary_base": 10_000.0,
    },
    "360M": _SKYLADDER
    | {
        "num_layers": 18,
        "hidden_size": 1024,
        "ffn_hidden_size": 4096,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "rotary_base": 10_000.0,
    },
    "1B": _SKYLADDER  # at 32K the paper takes --rotary-base 1000000
    | {
        "num_layers": 22,
        "hidden_size": 2048,
        "ffn_hidden_size": 5632,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "rotary_base": 10_000.0,
    },
    "3B": _SKYLADDER
    | {
        "num_layers": 28,
        "hidden_size": 3072,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 24,
        "num_query_groups": 8,
        "rotary_base": 100_000.0,
    },
    "Llama-3-8B": {
        "vocab_size": 128256,
        "norm_epsilon": 1e-5,
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "rotary_base": 500_000.0,
    },
    "Qwen2.5-0.5B": {
        "vocab_size": 151936,
        "norm_epsilon": 1e-6,
        "num_layers": 24,
        "hidden_size": 896,
        "ffn_hidden_size": 4864,
        "num_attention_heads": 14,
        "num_query_groups": 2,
        "rotary_base": 1_000_000.0,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
    },
    "Qwen3-0.6B": _QWEN3 | {"num_layers": 28, "hidden_size": 1024, "ffn_hidden_size": 3072, "num_attention_heads": 16},
    "Qwen3-1.7B": _QWEN3 | {"num_layers": 28, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 16},
    "Qwen3-4B": _QWEN3 | {"num_layers": 36, "hidden_size": 2560, "ffn_hidden_size": 9728, "num_attention_heads": 32},
    "Qwen3-8B": _QWEN3
    | {
        "num_layers": 36,
        "hidden_size": 4096,
        "ffn_hidden_size": 12288,
        "num_attention_heads": 32,
        "untie_embeddings_and_output_weights": True,
    },
    "Qwen3-30B-A3B": _QWEN3
    | {
        "num_layers": 48,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "untie_embeddings_and_output_weights": True,
    },
    "Mixtral-8x7B": {
        "vocab_size": 32000,
        "norm_epsilon": 1e-5,
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "rotary_base": 1_000_000.0,
        "num_experts": 8,
        "moe_router_topk": 2,
    },
    "Llama-3.2-1B": _LLAMA32 | {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 32},
    "Llama-3.2-3B": _LLAMA32 | {"num_layers": 28, "hidden_size": 3072, "num_attention_heads": 24},
    "Phi-2": {
        "block": "phi",
        "vocab_size": 51200,
        "norm_epsilon": 1e-5,
        "num_layers": 32,
        "hidden_size": 2560,
        "ffn_hidden_size": 10240,
        "num_attention_heads": 32,
        "num_query_groups": 32,
        "rotary_base": 10_000.0,
        "rotary_percent": 0.4,
    },
    "Gemma-3-1B": {
        "block": "gemma3",
        "vocab_size": 262144,
        "norm_epsilon": 1e-6,
        "num_layers": 26,
        "hidden_size": 1152,
        "ffn_hidden_size": 6912,
        "num_attention_heads": 4,
        "num_query_groups": 1,
        "kv_channels": 256,
        "rotary_base": 1_000_000.0,
        "rotary_base_local": 10_000.0,
        "local_window": 512,
        "window_attn_skip_freq": 6,
        "untie_embeddings_and_output_weights": False,
    },
    # 1M parameters with a vocabulary of 1024: tests and the smoke run
    "tiny-1M": {
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 384,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "rotary_base": 10_000.0,
    },
    # 5M parameters with a vocabulary of 4096: the demo
    "tiny-5M": {
        "num_layers": 5,
        "hidden_size": 256,
        "ffn_hidden_size": 576,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "rotary_base": 10_000.0,
    },
}
