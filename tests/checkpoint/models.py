"""Small random models of every architecture, as transformers writes them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
PHI = {"model_type": "phi", "layer_norm_eps": 1e-5, "rms_norm_eps": None}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 9, "rope_parameters": None}
LATENT = {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 12,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9, "first_k_dense_replace": 4,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
DEEPSEEK = {
    "norm_topk_prob": True, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 4,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
ONE_EXPERT = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
QWEN_LOCAL = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0, "layer_types": LOCAL_GLOBAL}
LLAMA = {"model_type": "llama"}
TIED = {"tie_word_embeddings": True}
WHOLE = {"sliding_window": None}


def turned(kind: str, base: float = 1000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **SCALED.get(kind, {}), **more}


def by_kind(everywhere: dict[str, Any], inside_windows: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": everywhere, "sliding_attention": inside_windows}}


DEEPSEEK_ROPE = turned("yarn", mscale=0.7, mscale_all_dim=1.3)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | TIED,
    "llama-mha": LLAMA | {"num_key_value_heads": 4},
    "llama-mqa-head": LLAMA | {"num_key_value_heads": 1, "head_dim": 12},
    "qwen2": {"model_type": "qwen2"} | TIED,
    "qwen2-local": {"model_type": "qwen2"} | QWEN_LOCAL,
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 8} | TIED,
    "qwen3-local": {"model_type": "qwen3", "head_dim": 16} | QWEN_LOCAL,
    "mistral": {"model_type": "mistral"} | WHOLE,
    "mistral-window": {"model_type": "mistral", "sliding_window": 9},
    # a width that transformers' Llama refuses
    "mistral-uneven": {"model_type": "mistral", "hidden_size": 30, "head_dim": 8} | WHOLE,
    "ministral": {"model_type": "ministral", "head_dim": 8, "sliding_window": 9, "layer_types": LOCAL_GLOBAL},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0], "pad_token_id": None},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 12, **EXPERTS, "num_experts": 6},
    "qwen3_moe-local": {"model_type": "qwen3_moe", "head_dim": 8, "use_sliding_window": True, "sliding_window": 9}
    | {"num_experts": 4, **EXPERTS, **TIED},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3} | WHOLE,
    "phi": PHI | {"rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}},
    "phi-tied": PHI | {"head_dim": 20, "partial_rotary_factor": 0.4} | TIED,
    "phi-yarn": PHI | {"rope_parameters": turned("yarn", partial_rotary_factor=0.5)},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 3}
    | {"sliding_window": 9, "rope_parameters": turned("yarn", truncate=False)},
    "gemma3": GEMMA3 | {"layer_types": LOCAL_GLOBAL},
    "gemma3-global": GEMMA3 | {"layer_types": ["full_attention"] * 4, "query_pre_attn_scalar": 5},
    "gemma3-scaled": GEMMA3
    | {"layer_types": LOCAL_GLOBAL, **by_kind(turned("linear", 5000.0, factor=8.0), turned("default", 5000.0))},
    "olmo3": {"model_type": "olmo3", "head_dim": 12, "sliding_window": 9}
    | by_kind(turned("yarn"), turned("default", 500.0)),
    "deepseek_v3-dense": LATENT,
    # these two can be used, but not trained
    "mixtral-top1": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 1} | WHOLE,
    "deepseek_v3-top1-wide": LATENT | DEEPSEEK | {"v_head_dim": 20} | ONE_EXPERT,
    "dots1": {"model_type": "dots1", "head_dim": 12, **DEEPSEEK} | WHOLE,
    "dots1-local": {"model_type": "dots1", "head_dim": 12, **DEEPSEEK}
    | {"sliding_window": 9, "layer_types": LOCAL_GLOBAL},
    "deepseek_v3": LATENT | DEEPSEEK | {"q_lora_rank": 14, "rope_parameters": DEEPSEEK_ROPE},
    **{f"llama-{kind}": LLAMA | {"rope_parameters": turned(kind)} for kind in SCALED},
}
QUICK = ("llama", "qwen3", "phi", "gemma3", "mixtral", "deepseek_v3-top1-wide")
# one of each kind of attention and experts, for what reads a model as another test has shown that it is read
DISTINCT = ("qwen2-local", "smollm3", "qwen3_moe-local", "gpt_oss", "gemma3-scaled", "olmo3", "dots1-local")
DISTINCT += ("deepseek_v3", "llama-dynamic", "llama-llama3", "mistral-window")
EACH = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in DISTINCT)]


def write_model(
    folder: Path, architecture: str, dtype: torch.dtype = torch.float32, shard="5GB", std=0.3, **changed: Any
) -> Path:
    """A model whose every parameter is random, norms and biases too."""
    values = deepcopy(SIZES | ARCHITECTURES[architecture] | changed)  # transformers adds entries to inner ones
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + 1 if "norm" in name else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * std)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
