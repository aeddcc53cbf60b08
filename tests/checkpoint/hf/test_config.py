"""Which transformers architecture says our model, and what transformers assumes where config.json is silent."""

from copy import deepcopy
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from megatron_ext.checkpoint.hf.config import FAMILIES, hugging_face_config, model_config
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError
from tests.checkpoint.models import ARCHITECTURES, SIZES
from tests.conftest import refused

LATENT = {"multi_latent_attention": True, "num_query_groups": 4, "kv_lora_rank": 20, "v_head_dim": 24}
EXPERTS = {
    "num_experts": 8, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 32,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
LOCAL = ("mistral", "ministral", "gemma3_text", "olmo3", "gpt_oss")
EPSILON = {"phi": "layer_norm_eps"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_silent_file_means_what_transformers_takes_it_for(family: str) -> None:
    """The file gives sizes alone: key heads, the local window, ties, experts and angles are the family's defaults."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    content = {name: SIZES[name] for name in sizes} | {EPSILON.get(family, "rms_norm_eps"): 1e-5}
    content |= {"model_type": family, "num_attention_heads": 32, "head_dim": 8}
    content |= {"num_key_value_heads": 32} if family == "deepseek_v3" else {}  # the default, 128, is not a divisor
    if family in ("qwen3_moe", "dots1"):
        content["norm_topk_prob"] = True  # by default false, which ours cannot be
    if family == "dots1":  # has no default
        content |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    model = model_config(content)
    config = AutoConfig.for_model(**content)
    assert model_config(content | {"rope_parameters": None}) == model
    if family != "gemma3_text":  # transformers reads these for Gemma alone
        assert model_config(content | {"sliding_window_pattern": 3, "rope_local_base_freq": 7.0}) == model
    if model.num_experts is not None:
        assert (model.num_experts, model.moe_router_topk) == (config.num_local_experts, config.num_experts_per_tok)
        assert model.expert_width == getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert model.rotary_percent == config.rope_parameters.get("partial_rotary_factor", 1.0)
    assert model.num_query_groups == config.num_key_value_heads
    assert model.local_window == (config.sliding_window if family in LOCAL else None)
    assert model.untie_embeddings_and_output_weights != config.tie_word_embeddings
    if family in ("gemma3_text", "olmo3"):
        angles = config.rope_parameters
        assert (model.rotary_base_local or model.rotary_base) == angles["sliding_attention"]["rope_theta"]
        assert model.rotary_base == angles["full_attention"]["rope_theta"]
        local = [model.window_attn_skip_freq is None or n % model.window_attn_skip_freq != 0 for n in (1, 2, 3, 4)]
        assert local == [name == "sliding_attention" for name in config.layer_types]
        assert model.query_pre_attn_scalar == getattr(config, "query_pre_attn_scalar", None)
        return
    assert model.rotary_base == config.rope_parameters["rope_theta"]
    assert model.rope_scaling_factor == config.rope_parameters.get("factor", 1.0)
    assert model.rope_truncate == config.rope_parameters.get("truncate", True)
    no_rope = getattr(config, "no_rope_layers", [1] * model.num_layers)
    assert [model.has_rope(layer) for layer in range(1, model.num_layers + 1)] == [
        bool(has_rope) for has_rope in no_rope
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"no_rope_freq": 2, "local_window": 9}, "no_rope_freq: got 2"),
        ({"block": "phi", "local_window": 9}, "local_window: got 9"),
        ({"local_window": 9, "rotary_base_local": 99.0}, "rotary_base_local: got 99.0"),
        ({"block": "olmo3", "softmax_type": "learnable"}, "softmax_type: got learnable"),
        (EXPERTS, "qk_layernorm: got False"),
        (LATENT | {"num_experts": 8}, "moe_shared_expert_intermediate_size: got None"),
        (LATENT | EXPERTS | {"moe_layer_freq": (1, 0, 1, 1)}, "moe_layer_freq: got"),
    ],
    ids=str,
)
def test_a_model_that_no_architecture_computes(options: dict[str, Any], text: str) -> None:
    assert text in refused(hugging_face_config, ModelConfig(**options), 300, 128)


@pytest.mark.parametrize(
    ("architecture", "changed", "text"),
    [
        ("llama", {"model_type": "gpt_neox"}, "model_type 'gpt_neox', needs one of llama, qwen2"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu', this model has 'silu' only"),
        ("llama", {"is_causal": False}, "is_causal False, this model has True only"),
        ("mistral-window", {"layer_types": ["full_attention"] + ["sliding_attention"] * 3}, "layer_types whose global"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 9},
            "layer_types with sliding_attention",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}, which this package does not"),
        ("llama", {"compression_config": {"a": 1}}, "support; use the model before its quantization"),
        ("llama", {"transformers_weights": "x.safetensors"}, "transformers_weights 'x.safetensors', which this"),
        ("llama", {"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, which this package"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0, this model has 7.0 only"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2, needs num_attention_heads 4"),
        ("qwen2-local", {"layer_types": ["full_attention"] + ["sliding_attention"] * 3}, "layer_types whose global"),
        ("ministral", {"layer_types": ["chunked_attention", "full_attention"] * 2}, "layer_types"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, "no_rope_layers that are not every n-th one"),
        ("qwen2-local", {"max_window_layers": None}, "max_window_layers None: Input should be a valid integer"),
        # what no model computes; transformers ignores a Gemma-3's old key `type`
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3, needs a divisor"),
        ("mixtral", {"num_experts_per_tok": 8, "num_local_experts": 4}, "num_experts_per_tok 8, needs at most"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "which default does not read"),
        # what can be neither trained nor used; what can only not be trained is in ARCHITECTURES
        ("llama-mqa-head", {"head_dim": 5}, "cannot run here: kv_channels: got 5, needs an even head size"),
        ("deepseek_v3", {"qk_rope_head_dim": 5, "rope_parameters": None}, "cannot run here: qk_pos_emb_head_dim"),
    ],
)
def test_entries_that_change_the_model_are_refused(architecture: str, changed: dict[str, Any], text: str) -> None:
    """Entries that this package does not know are refused too, unless they are null."""
    content = SIZES | ARCHITECTURES[architecture]
    absent = {name: content.get(name) for name, value in changed.items() if value}
    model_config(content | absent | {"pretraining_tp": 2})
    assert text in refused(model_config, content | changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_one_is_told_to_remove_an_entry_that_transformers_reads(family: str) -> None:
    """Entries of transformers' own class change what is computed; layers that predict further tokens do not."""
    content = SIZES | next(entries for entries in ARCHITECTURES.values() if entries["model_type"] == family)
    names = {field.name for field in fields(type(AutoConfig.for_model(family)))} - {"num_mtp_layers"}
    messages = list[str]()
    for name, value in product(names, (True, 0.5, [1])):
        try:
            model_config(content | {name: value})
        except UserError as error:
            messages.append(str(error))
    assert not [text for text in messages if "remove it" in text]
    assert "remove it" in refused(model_config, content | {"no_entry_of_transformers": 0.5})


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "ministral", "smollm3", "olmo3"])
def test_layer_types_without_a_window_are_refused_as_transformers_cannot_run_them(family: str) -> None:
    off = {"sliding_window": None, "use_sliding_window": False}
    content = SIZES | next(entries for entries in ARCHITECTURES.values() if entries["model_type"] == family) | off
    layers = content["num_hidden_layers"]
    model_config(content | {"layer_types": ["full_attention"] * layers})
    content |= {"layer_types": ["sliding_attention"] * layers}
    assert "layer_types with sliding_attention, needs a sliding_window" in refused(model_config, content)
    values = deepcopy(content)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with pytest.raises((ValueError, TypeError)):
        model(torch.tensor([[1, 2, 3]]))


def test_mistrals_layers_and_gemmas_pattern_are_what_auto_config_makes_of_them() -> None:
    mistral = SIZES | {"model_type": "mistral", "sliding_window": 9}
    alternating = mistral | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    for content in (mistral, alternating):
        config = AutoConfig.for_model(
            **(content | {"model_type": "ministral" if "layer_types" in content else "mistral"})
        )
        period = 2 if "full_attention" in (getattr(config, "layer_types", None) or ()) else None
        assert (model_config(content).local_window, model_config(content).window_attn_skip_freq) == (9, period)
    gemma = SIZES | ARCHITECTURES["gemma3"] | {"layer_types": None, "_sliding_window_pattern": 2}
    types = AutoConfig.for_model(**gemma).layer_types
    every = model_config(gemma).window_attn_skip_freq or 100
    assert types == [f"{'sliding' if layer % every else 'full'}_attention" for layer in range(1, len(types) + 1)]


def test_entries_that_only_concern_generation_change_nothing() -> None:
    """All of transformers' own, of which no family's computation reads any, and others that old files have."""
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    basic = {field.name for field in fields(PreTrainedConfig)} - {"is_encoder_decoder"}
    old = {"prefix", "tokenizer_class", "num_labels", "task_specific_params", "torchscript", "transformers.js_config"}
    content = SIZES | ARCHITECTURES["llama"]
    assert model_config(dict.fromkeys(names | basic | old, 1) | content) == model_config(content)
    dots = SIZES | ARCHITECTURES["dots1"]  # whose files say both
    assert model_config(dots | {"scoring_func": "noaux_tc"}) == model_config(dots | {"scoring_func": "sigmoid"})
    for family in FAMILIES:
        read = {field.name for field in fields(type(AutoConfig.for_model(family)))}
        assert read & names <= basic | {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}, family
