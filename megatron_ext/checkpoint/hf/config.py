"""Translate a Hugging Face config.json to a ModelConfig and back.

    family      layers are            written when
    llama       global                there are no biases
    qwen2       global or local       there are biases on queries, keys and values
    qwen3       global or local       queries and keys are normalized
    mistral     global, or all local  all layers are local; or a Llama's width is not a multiple of its heads,
                                      which transformers rejects only for Llama
    ministral   global or local       some layers are local, and there are no biases
    smollm3     global                some layers have no RoPE
    qwen3_moe   global, or all local  as qwen3, with experts
    mixtral     global, or all local  there are experts, and none of the above
    phi         global                the block is Phi's
    gemma3_text global or local       the block is Gemma's
    olmo3       global or local       the block is Olmo's
    gpt_oss     global or local       the block is gpt-oss's
    deepseek_v3 global                there is latent attention
    dots1       global                as qwen3, with DeepSeek-V3's experts

Values that the other side does not support raise an error, and so do unknown entries, because they may change the
model's results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Required

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from megatron_ext.checkpoint.hf.rope import rope_entries, with_rope
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError, echo

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi": "PhiForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
}
# transformers' defaults that differ from ours
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1_000_000.0},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "olmo3": {"sliding_window": 4096},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek_v3": {
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
    },
    "dots1": {
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
}
# the families that read attention_bias
_BIASES = ("llama", "qwen3", "qwen3_moe", "smollm3", "gemma3_text", "olmo3", "deepseek_v3", "dots1")
_QWEN = ("qwen2", "qwen3")
_DEEPSEEK = ("deepseek_v3", "dots1")  # families with DeepSeek-V3's experts
_ALL_LOCAL = ("mistral", "mixtral", "qwen3_moe")  # families whose layers are all local, or all global
# the families' names of num_experts, moe_router_topk and moe_ffn_hidden_size
_EXPERTS = {
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "mixtral": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    **dict.fromkeys(_DEEPSEEK, ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")),
}
# Hugging Face's names of the options of latent attention
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_LAYER_TYPES = ("sliding_attention", "full_attention")
# llama for the others
_BLOCKS: dict[str, Literal["phi", "gemma3", "olmo3", "gpt_oss"]] = {
    "phi": "phi",
    "gemma3_text": "gemma3",
    "olmo3": "olmo3",
    "gpt_oss": "gpt_oss",
}
_EPSILON = {"phi": "layer_norm_eps"}  # rms_norm_eps for the others
# entries that must have this value, the only one that our model supports
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_mrope": False,
    "is_encoder_decoder": False,
}
_FIXED_OF: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"router_jitter_noise": 0.0},
    "gpt_oss": {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "deepseek_v3": {"norm_topk_prob": True, "rope_interleave": True, "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "dots1": {"norm_topk_prob": True, "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "phi": {"hidden_act": "gelu_new", "qk_layernorm": False},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}
_ACTIVATIONS = ("hidden_act", "hidden_activation")
# entries that do not change what the model computes
_SILENT = {
    *("architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp", "_attn_implementation"),
    *("id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states"),
    *("chunk_size_feed_forward", "attention_bias"),  # the latter only in families that do not read it
    *("resid_pdrop", "embd_pdrop", "cache_implementation"),  # training dropout: --hidden-dropout
    *("router_aux_loss_coef", "output_router_logits"),  # training only: --moe-aux-loss-coeff
    *("experts_per_token", "initial_context_length"),  # gpt-oss: other names of entries that are there, too
}
# DeepSeek's own code computes the same; a head's sizes follow from others; further tokens are not predicted here
_SILENT_OF_DEEPSEEK = {
    *("auto_map", "topk_method", "ep_size", "aux_loss_alpha", "seq_aux", "qk_head_dim", "num_nextn_predict_layers"),
}


_Integer = Annotated[int, Field(strict=True, gt=0, le=2**40)]
_Number = Annotated[float, Field(strict=True, gt=0, le=2**40, allow_inf_nan=False)]
_Boolean = Annotated[bool, Field(strict=True)]


class _Entries(TypedDict, total=False):
    """The types of the entries that `model_config` reads; transformers ignores those of other families, too."""

    num_hidden_layers: Required[Annotated[_Integer, Field(le=10_000)]]
    hidden_size: Required[_Integer]
    intermediate_size: Required[_Integer]
    num_attention_heads: Required[_Integer]
    vocab_size: Required[_Integer]
    num_key_value_heads: _Integer | None
    head_dim: _Integer | None
    sliding_window: _Integer | None
    max_window_layers: Annotated[int, Field(strict=True, ge=0)]
    max_position_embeddings: _Integer | None
    original_max_position_embeddings: _Integer | None
    no_rope_layer_interval: _Integer
    query_pre_attn_scalar: _Integer | None
    sliding_window_pattern: _Integer
    _sliding_window_pattern: _Integer
    rope_theta: _Number | None
    rope_local_base_freq: _Number | None
    partial_rotary_factor: _Number | None
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    layer_types: list[str] | None
    no_rope_layers: list[int] | None
    tie_word_embeddings: _Boolean | None
    use_sliding_window: _Boolean | None
    num_experts: _Integer
    num_local_experts: _Integer
    num_experts_per_tok: _Integer
    moe_intermediate_size: _Integer
    n_routed_experts: _Integer
    n_shared_experts: _Integer
    n_group: _Integer | None
    topk_group: _Integer | None
    routed_scaling_factor: _Number
    first_k_dense_replace: Annotated[int, Field(strict=True, ge=0, le=10_000)]
    q_lora_rank: _Integer | None
    kv_lora_rank: _Integer
    qk_nope_head_dim: _Integer
    qk_rope_head_dim: _Integer
    v_head_dim: _Integer
    rms_norm_eps: _Number | None
    layer_norm_eps: _Number | None


def model_config(entries: dict[str, Any], path: Path) -> ModelConfig:
    """Build a ModelConfig from the entries of config.json; `vocab_size` is the number of rows of the embedding.

    Args:
        entries: the entries.
        path: path of the file, for messages.

    Raises:
        UserError: another architecture, or an entry that our model does not support; the message names it.
    """
    family = entries.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"checkpoint: {path} has model_type {echo(family)}, needs one of {', '.join(FAMILIES)}")
    entries = {name: value for name, value in entries.items() if (name, value) != ("rope_parameters", None)}
    entries = _DEFAULTS.get(family, {}) | entries
    if family == "qwen3_moe" and "num_local_experts" in entries:  # the name in some versions of transformers
        entries["num_experts"] = entries.pop("num_local_experts")
    if family == "dots1" and entries.get("scoring_func") == "noaux_tc":  # in some published files, for sigmoid
        entries["scoring_func"] = "sigmoid"
    try:
        TypeAdapter(_Entries).validate_python(entries)
    except ValidationError as error:
        first = error.errors()[0]
        given = "" if first["type"] == "missing" else f" {echo(first['input'])}"
        raise UserError(f"checkpoint: {path} has {first['loc'][0]}{given}: {first['msg']}; use another model") from None
    if entries.get(epsilon := _EPSILON.get(family, "rms_norm_eps")) is None:
        raise UserError(f"checkpoint: {path} has no {epsilon}; use another model")
    _check_expressible(entries, path)
    heads, groups = entries["num_attention_heads"], entries.get("num_key_value_heads") or entries["num_attention_heads"]
    if heads % groups:
        raise UserError(
            f"checkpoint: {path} has num_key_value_heads {groups}, needs a divisor of num_attention_heads {heads}"
        )
    latent = family == "deepseek_v3"
    if latent and heads != groups:
        raise UserError(f"checkpoint: {path} has num_key_value_heads {groups}, needs num_attention_heads {heads}")
    head_size = entries.get("head_dim") or entries["hidden_size"] // heads
    scalar = entries["query_pre_attn_scalar"] if family == "gemma3_text" else None
    local_window, every = _layers(entries, path)
    model = ModelConfig(
        block=_BLOCKS.get(family, "llama"),
        num_layers=entries["num_hidden_layers"],
        hidden_size=entries["hidden_size"],
        ffn_hidden_size=entries["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=None if latent else entries.get("head_dim"),
        multi_latent_attention=latent,
        **({ours: entries[theirs] for ours, theirs in _LATENT.items()} if latent else {}),
        vocab_size=entries["vocab_size"],
        norm_epsilon=entries[epsilon],
        untie_embeddings_and_output_weights=not entries.get("tie_word_embeddings", False),
        add_qkv_bias=family == "qwen2",
        qk_layernorm=family in ("qwen3", "qwen3_moe", "dots1"),
        **_experts(entries, path),
        local_window=local_window,
        window_attn_skip_freq=every,
        query_pre_attn_scalar=None if scalar == head_size else scalar,
        no_rope_freq=_no_rope(entries, path) if family == "smollm3" else None,
    )
    return with_rope(model, entries, path)


def _experts(entries: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the options of experts; {} if the family has no experts.

    Raises:
        UserError: a token would choose more experts than there are.
    """
    theirs = _EXPERTS.get(entries["model_type"])
    if theirs is None:
        return {}
    needed = (*theirs, "n_shared_experts") if entries["model_type"] in _DEEPSEEK else theirs
    missing = next((name for name in needed if entries.get(name) is None), None)
    if missing is not None:
        raise UserError(f"checkpoint: {path} has no {missing}; use another model")
    number, choices, width = (entries[name] for name in theirs)
    if choices > number:
        raise UserError(f"checkpoint: {path} has {theirs[1]} {choices}, needs at most {theirs[0]} {number}")
    own_width = None if width == entries["intermediate_size"] else width
    experts = {"num_experts": number, "moe_router_topk": choices, "moe_ffn_hidden_size": own_width}
    return _deepseek_experts(entries, experts) if entries["model_type"] in _DEEPSEEK else experts


def _deepseek_experts(entries: dict[str, Any], experts: dict[str, Any]) -> dict[str, Any]:
    """Return the options of DeepSeek-V3's experts; {} if all layers are dense."""
    layers, dense = entries["num_hidden_layers"], entries["first_k_dense_replace"]
    if dense >= layers:
        return {}
    grouped = (entries["n_group"] or 1) > 1
    return experts | {
        "moe_shared_expert_intermediate_size": entries["n_shared_experts"] * entries["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": entries["n_group"] if grouped else None,
        "moe_router_group_topk": entries["topk_group"] if grouped else None,
        "moe_router_topk_scaling_factor": float(entries["routed_scaling_factor"]),
        "moe_layer_freq": (0,) * dense + (1,) * (layers - dense) if dense else (),
    }


def _check_expressible(entries: dict[str, Any], path: Path) -> None:
    family = entries["model_type"]
    fixed = _FIXED | _FIXED_OF.get(family, {}) | ({"attention_bias": False} if family in _BIASES else {})
    known = {"model_type", *_Entries.__annotations__, *_SILENT, *fixed}
    known |= _SILENT_OF_DEEPSEEK if family in _DEEPSEEK else set()
    for name, ours in fixed.items():
        value = entries.get(name, ours)
        if value != ours and (value is not None or ours is True):  # transformers takes null for false
            raise UserError(
                f"checkpoint: {path} has {name} {echo(value)}, this model has {ours!r} only; use another model"
            )
    for name, value in entries.items():
        if name not in known and value not in (None, False):
            raise UserError(
                f"checkpoint: {path} has {name} {echo(value)}, which this package does not know; "
                "remove it if it does not change what the model computes"
            )


def _layers(entries: dict[str, Any], path: Path) -> tuple[int | None, int | None]:
    """Return local_window and window_attn_skip_freq."""
    family, window, layers = entries["model_type"], entries.get("sliding_window"), entries["num_hidden_layers"]
    if family in ("llama", "phi", "deepseek_v3") or (
        family in (*_QWEN, "qwen3_moe", "smollm3") and not entries.get("use_sliding_window")
    ):
        window = None
    if window is None:
        return None, None
    types = entries.get("layer_types") if family not in _ALL_LOCAL else None
    if types and (len(types) != layers or not set(types) <= set(_LAYER_TYPES)):
        needs = f"num_hidden_layers {layers} of {' and '.join(_LAYER_TYPES)}"
        raise UserError(f"checkpoint: {path} has layer_types {echo(types)}, needs {needs}")
    local = [name == _LAYER_TYPES[0] for name in types] if types else [True] * layers
    if family in (*_QWEN, "dots1") and not types:
        local = [layer >= entries.get("max_window_layers", 28) for layer in range(layers)]
    if family == "gemma3_text" and not types:
        period = entries.get("sliding_window_pattern", entries.get("_sliding_window_pattern", 6))
        local = [layer % period != 0 for layer in range(1, layers + 1)]
    if family == "olmo3" and not types:
        local = [layer % 4 != 0 for layer in range(1, layers + 1)]
    if family == "gpt_oss" and not types:
        local = [layer % 2 != 0 for layer in range(1, layers + 1)]
    if not any(local):
        return None, None
    return window, _period(local, "layer_types whose global layers", "--window-attn-skip-freq", path)


def _period(others: list[bool], what: str, option: str, path: Path) -> int | None:
    """Return n if exactly every n-th layer is False; None if all are True."""
    period = others.index(False) + 1 if False in others else None
    if others != [period is None or layer % period != 0 for layer in range(1, len(others) + 1)]:
        raise UserError(f"checkpoint: {path} has {what} are not every n-th one, all that {option} can say")
    return period


def _no_rope(entries: dict[str, Any], path: Path) -> int | None:
    """Return no_rope_freq; layers with 1 in `no_rope_layers` have RoPE."""
    interval = entries.get("no_rope_layer_interval", 4)
    rotated = entries.get("no_rope_layers") or [
        layer % interval != 0 for layer in range(1, entries["num_hidden_layers"] + 1)
    ]
    return _period([bool(one) for one in rotated], "no_rope_layers that", "--no-rope-freq", path)


def family_of(model: ModelConfig) -> str:
    """Return the transformers architecture that computes the same function.

    Raises:
        UserError: there is none.
    """
    exclusive = [("block", "local_window")] if model.block == "phi" else []
    if model.no_rope_freq is not None:
        exclusive += [("no_rope_freq", other) for other in ("add_qkv_bias", "qk_layernorm", "local_window")]
    if model.num_experts is not None and model.block != "gpt_oss":
        exclusive += [("num_experts", "window_attn_skip_freq")]
    if model.block not in ("gemma3", "olmo3"):
        exclusive += [("block", "rotary_base_local")]
    if model.block != "gpt_oss" and model.softmax_type == "learnable":
        exclusive += [("block", "softmax_type")]
    for one, other in exclusive:
        if getattr(model, other):
            raise UserError(
                f"{one}: got {getattr(model, one)} with {other} {getattr(model, other)}, "
                "transformers has no architecture with both; it cannot be converted"
            )
    sigmoid = model.moe_router_score_function == "sigmoid"
    if model.multi_latent_attention or sigmoid or model.moe_shared_expert_intermediate_size or model.moe_layer_freq:
        family = "deepseek_v3" if model.multi_latent_attention else "dots1"
        if model.num_experts is not None and not _has_deepseek_experts(model):
            raise UserError(
                f"num_experts: got {model.num_experts}, {family} of transformers needs qk_layernorm or "
                "multi_latent_attention, no local_window, sigmoid scores with an expert bias, shared experts of a "
                "multiple of an expert's width, and dense layers before all others; it cannot be converted"
            )
        return family
    for family, block in _BLOCKS.items():
        if model.block == block:
            return family
    if model.no_rope_freq is not None:
        return "smollm3"
    if model.num_experts is not None:
        return "qwen3_moe" if model.qk_layernorm else "mixtral"
    if model.qk_layernorm:
        return "qwen3"
    if model.add_qkv_bias:
        return "qwen2"
    if model.local_window is not None:
        return "mistral" if model.window_attn_skip_freq is None else "ministral"
    return "llama" if model.hidden_size % model.num_attention_heads == 0 else "mistral"


def _has_deepseek_experts(model: ModelConfig) -> bool:
    """Return whether a model's experts are DeepSeek-V3's, in a family that has them."""
    shared = model.moe_shared_expert_intermediate_size or 0
    return bool(
        (model.qk_layernorm or model.multi_latent_attention)
        and model.local_window is None
        and model.moe_router_score_function == "sigmoid"
        and model.moe_router_enable_expert_bias
        and shared
        and shared % model.expert_width == 0
        and list(model.moe_layer_freq) == sorted(model.moe_layer_freq)
    )


def _deepseek_entries(model: ModelConfig) -> dict[str, Any]:
    """Return the entries of latent attention and of DeepSeek-V3's experts; without experts all layers are dense."""
    entries: dict[str, Any] = {"first_k_dense_replace": model.num_layers - model.expert_layers}
    if model.multi_latent_attention:
        entries |= {theirs: getattr(model, ours) for ours, theirs in _LATENT.items()}
        entries |= {"num_nextn_predict_layers": 0}
    if model.num_experts is None:
        return entries
    assert model.moe_shared_expert_intermediate_size is not None  # `_has_deepseek_experts`
    return entries | {
        "topk_method": "noaux_tc",
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_width,
        "n_shared_experts": model.moe_shared_expert_intermediate_size // model.expert_width,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor,
    }


def hugging_face_config(model: ModelConfig, vocab_size: int, row_length: int) -> dict[str, Any]:
    """Return the entries of `config.json` for a model with these shapes.

    Args:
        model: the shapes.
        vocab_size: V, without padding.
        row_length: L, written as `max_position_embeddings`.

    Raises:
        UserError: transformers has no such model.
    """
    family = family_of(model)
    experts: dict[str, Any] = {}
    if family in _DEEPSEEK:
        experts = _FIXED_OF[family] | _deepseek_entries(model)
    elif family in _EXPERTS:
        number, choices, width = _EXPERTS[family]
        sizes = {number: model.num_experts, choices: model.moe_router_topk, width: model.expert_width}
        experts = _FIXED_OF[family] | sizes
    return {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "pad_token_id": None,  # transformers does not train the padding row; Gemma's default is 0
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        **experts,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        **({} if model.multi_latent_attention else {"head_dim": model.head_size}),
        **{name: value for name, value in (_FIXED | _FIXED_OF.get(family, {})).items() if name in _ACTIVATIONS},
        "initializer_range": model.init_method_std,
        _EPSILON.get(family, "rms_norm_eps"): model.norm_epsilon,
        **rope_entries(model, row_length),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        **({"attention_bias": False, "mlp_bias": False} if family in _BIASES else {}),
        **(
            {"query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_size} if family == "gemma3_text" else {}
        ),
        **_window_entries(model, family),
    }


def _window_entries(model: ModelConfig, family: str) -> dict[str, Any]:
    if family == "dots1":
        return {"sliding_window": None}
    if family == "smollm3":
        return {"no_rope_layers": [int(model.has_rope(layer)) for layer in range(1, model.num_layers + 1)]}
    if family in ("llama", "phi", "deepseek_v3") or (family in (*_QWEN, "qwen3_moe") and model.local_window is None):
        return {}
    if family in _ALL_LOCAL:
        return {"sliding_window": model.local_window} | ({"use_sliding_window": True} if family == "qwen3_moe" else {})
    # Gemma's and Olmo's configurations have a window even if no layer is local
    window: dict[str, Any] = {"sliding_window": model.local_window or 4096}
    every = model.window_attn_skip_freq if model.local_window is not None else 1
    local = [every is None or layer % every != 0 for layer in range(1, model.num_layers + 1)]
    window["layer_types"] = [_LAYER_TYPES[0 if is_local else 1] for is_local in local]
    return window | ({"use_sliding_window": True, "max_window_layers": 0} if family in _QWEN else {})
