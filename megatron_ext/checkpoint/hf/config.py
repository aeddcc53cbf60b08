"""Translate a Hugging Face config.json to a ModelConfig and back.

Values that our model does not support raise an error, and so do unknown entries, because they may change the model's
results.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError, create_model

from megatron_ext.checkpoint.hf.rope import Angles, rope_entries, with_rope
from megatron_ext.config import Config, DataConfig, ModelConfig
from megatron_ext.config.checks import mistakes
from megatron_ext.errors import UserError, echo
from megatron_ext.files.reading import JsonObject, read_yaml, typed


@dataclass(frozen=True)
class Family:
    """An architecture of transformers, an entry of families.yaml."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    architecture: str  # its class in transformers
    names: dict[str, str]  # the options that equal an entry, by its name
    options: JsonObject = field(default_factory=dict)  # our options that all its models have
    # transformers' values of missing entries, if they differ from ours
    defaults: JsonObject = field(default_factory=dict)
    # entries that must have this value, the only one that our model supports
    fixed: JsonObject = field(default_factory=dict)
    # which layers can be local. None: none of them; all: all or none; some: any, listed in `layer_types`.
    local: Literal["all", "some"] | None = None
    # the names of the number of experts and of their width; None if there are no experts
    experts: tuple[str, str] | None = None
    ignored: tuple[str, ...] = ()  # further entries that transformers does not read for this family

    @property
    def like_deepseek(self) -> bool:
        """Whether it has DeepSeek-V3's experts, in all layers but the first ones."""
        return "first_k_dense_replace" in self.defaults


_FILE = Path(__file__).with_name("families.yaml")
_WRITTEN = read_yaml(_FILE)
_SILENT = set(chain.from_iterable(_WRITTEN[".silent"]))  # entries that do not change what the model computes
_COMPUTED = set(_WRITTEN[".computed"])  # entries that do, in transformers' code of some families
# names with a dot are shared parts
FAMILIES = typed({k: family for k, family in _WRITTEN.items() if k[0] != "."}, dict[str, Family], _FILE)
_FIXED = {"hidden_act": "silu"}
_LOCAL = "sliding_attention"
_GLOBAL = "full_attention"
_Integer = Annotated[int, Field(strict=True, gt=0, le=2**40)]
_Number = Annotated[float, Field(strict=True, gt=0, le=1e300, allow_inf_nan=False)]
_Count = Annotated[int, Field(strict=True, ge=0, le=10_000)]
# the types of the entries that are read; transformers also ignores the entries of other families
_TYPES: dict[Any, str] = {
    Annotated[_Integer, Field(le=10_000)]: "num_hidden_layers",
    _Integer: "hidden_size intermediate_size num_attention_heads vocab_size no_rope_layer_interval "
    "sliding_window_pattern num_experts num_local_experts num_experts_per_tok moe_intermediate_size n_routed_experts "
    "n_shared_experts kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    _Integer | None: "num_key_value_heads head_dim sliding_window max_position_embeddings query_pre_attn_scalar "
    "original_max_position_embeddings n_group topk_group q_lora_rank",
    _Count: "max_window_layers first_k_dense_replace",
    _Number: "routed_scaling_factor",
    _Number | None: "rope_theta rope_local_base_freq partial_rotary_factor rms_norm_eps layer_norm_eps",
    Annotated[bool, Field(strict=True)] | None: "tie_word_embeddings use_sliding_window",
    list[str] | None: "layer_types",
    list[int] | None: "no_rope_layers",
    Angles | None: "rope_scaling rope_parameters",
}
_FIELDS: JsonObject = {name: (kind, None) for kind, names in _TYPES.items() for name in names.split()}
_ENTRIES: type[BaseModel] = create_model("_ENTRIES", **_FIELDS)


def model_config(entries: JsonObject) -> ModelConfig:
    """Build a ModelConfig from the entries of config.json; `vocab_size` is the number of rows of the embedding.

    Raises:
        UserError: another architecture, or an entry that our model does not support; the message names it.
    """
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"has model_type {echo(kind)}, needs one of {', '.join(FAMILIES)}")
    if kind == "mistral" and "layer_types" in entries:  # as in AutoConfig
        kind = "ministral"
    family = FAMILIES[kind]
    entries = family.defaults | _entries_read(kind, entries)
    _check(entries, family)
    latent = family.options.get("multi_latent_attention", False)
    heads = entries["num_attention_heads"]
    groups = entries.get("num_key_value_heads") or heads
    if heads % groups or (latent and heads != groups):
        needs = "num_attention_heads" if latent else "a divisor of num_attention_heads"
        raise UserError(f"has num_key_value_heads {groups}, needs {needs} {heads}")
    model = ModelConfig(
        **family.options,
        **{option: entries[name] for name, option in family.names.items()},
        num_query_groups=groups,
        kv_channels=None if latent else entries.get("head_dim"),
        untie_embeddings_and_output_weights=not entries.get("tie_word_embeddings", False),
        no_rope_freq=_no_rope(entries) if kind == "smollm3" else None,
        **_expert_options(entries, family),
        **_local_options(entries, family),
    )
    if model.query_pre_attn_scalar == model.head_size:
        model = replace(model, query_pre_attn_scalar=None)
    config = Config(model=with_rope(model, entries), data=DataConfig(data_path=("none",)))
    for mistake in mistakes(config, 1, training=False):
        raise UserError(f"has values with which it cannot run here: {mistake}")
    return config.model


def _entries_read(kind: str, entries: JsonObject) -> JsonObject:
    """Return the entries that transformers reads for a family, with their current names and values.

    Some versions of transformers, and some published files, have others.
    """
    entries = dict(entries)
    for name in ("rope_parameters", "rope_local_base_freq"):
        if entries.get(name) is None:
            entries.pop(name, None)
    if kind != "gemma3_text":
        for name in ("rope_local_base_freq", "sliding_window_pattern"):
            entries.pop(name, None)
    if kind == "qwen3_moe" and "num_local_experts" in entries:
        entries["num_experts"] = entries.pop("num_local_experts")
    if kind == "dots1" and entries.get("scoring_func") == "noaux_tc":
        entries["scoring_func"] = "sigmoid"
    return entries


def _check(entries: JsonObject, family: Family) -> None:
    """Check the types of entries, and that none is missing or unsupported."""
    try:
        _ENTRIES.model_validate(entries)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"has {'.'.join(map(str, first['loc']))} {echo(first['input'])}: {first['msg']}") from None
    needed = {*family.names} - {"q_lora_rank"}
    if family.experts:
        needed |= {*family.experts, "num_experts_per_tok"}
    if family.like_deepseek:
        needed |= {"n_shared_experts"}
    for name in sorted(needed):
        if entries.get(name) is None:
            raise UserError(f"has no {name}; use another model")
    fixed = {"is_causal": True} | _FIXED | family.fixed
    for name, supported in fixed.items():
        value = entries.get(name, supported)
        if value != supported and (value is not None or supported is True):  # transformers takes null for false
            raise UserError(f"has {name} {echo(value)}, this model has {supported!r} only; use another model")
    for name, value in entries.items():
        if value and name not in {*_FIELDS, *_SILENT, *fixed, *family.ignored}:
            raise UserError(f"has {name} {echo(value)}, which this package does not support; {_remedy(name)}")


def _remedy(entry: str) -> str:
    """Return what to do about an unsupported entry."""
    if entry in _COMPUTED:
        return "it changes what the model computes; use another model"
    if entry == "attention_dropout":
        return "set it to 0 to train without"
    if re.search("quant|compress", entry):
        return "use the model before its quantization"
    return "remove it if it does not change what the model computes"


def _expert_options(entries: JsonObject, family: Family) -> JsonObject:
    if family.experts is None:
        return {}
    number, width = family.experts
    experts = entries[number]
    choices = entries["num_experts_per_tok"]
    if choices > experts:
        raise UserError(f"has num_experts_per_tok {choices}, needs at most {number} {experts}")
    options = {"num_experts": experts, "moe_router_topk": choices}
    if entries[width] != entries["intermediate_size"]:
        options["moe_ffn_hidden_size"] = entries[width]
    if not family.like_deepseek:
        return options
    dense_layers = entries["first_k_dense_replace"]
    expert_layers = entries["num_hidden_layers"] - dense_layers
    if expert_layers <= 0:
        return {}
    if dense_layers:
        options["moe_layer_freq"] = (0,) * dense_layers + (1,) * expert_layers
    if (entries["n_group"] or 1) > 1:
        options["moe_router_num_groups"] = entries["n_group"]
        options["moe_router_group_topk"] = entries["topk_group"]
    return options | {
        "moe_shared_expert_intermediate_size": entries["n_shared_experts"] * entries["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(entries["routed_scaling_factor"]),
    }


def _local_options(entries: JsonObject, family: Family) -> JsonObject:
    window = entries.get("sliding_window")
    if "use_sliding_window" in family.defaults and not entries["use_sliding_window"]:
        window = None
    reads_types = family.local == "some" or "use_sliding_window" in family.fixed
    is_missing = window is None or family.local is None
    if reads_types and is_missing and _LOCAL in (entries.get("layer_types") or ()):
        needs = "a sliding_window, and use_sliding_window true where there is such an entry"
        raise UserError(f"has layer_types with {_LOCAL}, needs {needs}, or {_GLOBAL} alone")
    if family.local is None or window is None:
        return {}
    local = [True] * entries["num_hidden_layers"]
    if family.local == "some":
        local = _local_by_entries(entries, family)
    if not any(local):
        return {}
    period = _period(local, "layer_types whose global layers", "--window-attn-skip-freq")
    return {"local_window": window, "window_attn_skip_freq": period}


def _local_by_entries(entries: JsonObject, family: Family) -> list[bool]:
    """Return whether each layer is local, in a family with both kinds of layers."""
    layers = range(1, entries["num_hidden_layers"] + 1)
    types = entries.get("layer_types")
    if types:
        if len(types) != len(layers) or not set(types) <= {_LOCAL, _GLOBAL}:
            needs = f"num_hidden_layers {len(layers)} of {_LOCAL} and {_GLOBAL}"
            raise UserError(f"has layer_types {echo(types)}, needs {needs}")
        return [name == _LOCAL for name in types]
    if "max_window_layers" in family.defaults:
        return [layer > entries["max_window_layers"] for layer in layers]
    if "sliding_window_pattern" in family.defaults:
        return [layer % entries["sliding_window_pattern"] != 0 for layer in layers]
    return [True] * len(layers)


def _no_rope(entries: JsonObject) -> int | None:
    """Return no_rope_freq; layers with 1 in `no_rope_layers` have RoPE."""
    has_rope = entries.get("no_rope_layers")
    if not has_rope:
        has_rope = [layer % entries["no_rope_layer_interval"] for layer in range(1, entries["num_hidden_layers"] + 1)]
    return _period([*map(bool, has_rope)], "no_rope_layers that", "--no-rope-freq")


def _period(layers: list[bool], what: str, option: str) -> int | None:
    """Return n if exactly every n-th layer is False; None if all are True."""
    if all(layers):
        return None
    period = layers.index(False) + 1
    if layers != [layer % period != 0 for layer in range(1, len(layers) + 1)]:
        raise UserError(f"has {what} are not every n-th one, all that {option} can say")
    return period


def hugging_face_config(model: ModelConfig, vocab_size: int, row_length: int) -> JsonObject:
    """Return the entries of `config.json` for a model with these shapes; `max_position_embeddings` is `row_length`.

    Raises:
        UserError: transformers has no such model; the message names an option that the most similar one does not have.
    """
    model = replace(model, vocab_size=vocab_size)
    differing: dict[str, list[str]] = {}  # options, by family
    for kind in FAMILIES:
        if kind == "llama" and model.hidden_size % model.num_attention_heads:  # rejected by transformers
            continue
        entries = _entries(model, kind, row_length)
        with suppress(UserError):  # not even a model of this family
            differing[kind] = differences(model_config(entries), model)
            if not differing[kind]:
                return entries
    kind = min(differing, key=lambda kind: ("block" in differing[kind], len(differing[kind])))
    name = differing[kind][0]
    raise UserError(
        f"{name}: got {getattr(model, name)}, which the most similar architecture of transformers, {kind}, does not "
        "have; the model cannot be converted"
    )


def _entries(model: ModelConfig, kind: str, row_length: int) -> JsonObject:
    """Return the entries for a family, which may be unable to express some options."""
    family = FAMILIES[kind]
    entries = {
        "architectures": [family.architecture],
        "model_type": kind,
        "pad_token_id": None,  # transformers does not train the padding row; Gemma's default is 0
        **{name: getattr(model, option) for name, option in family.names.items()},
        **(_FIXED | family.fixed),
        **_expert_entries(model, family),
        "num_key_value_heads": model.num_query_groups,
        "initializer_range": model.init_method_std,
        **rope_entries(model, row_length),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        **_local_entries(model, family),
    }
    if not model.multi_latent_attention:
        entries["head_dim"] = model.head_size
    if kind == "gemma3_text":
        entries["query_pre_attn_scalar"] = model.query_pre_attn_scalar or model.head_size
        entries["rope_local_base_freq"] = model.rotary_base_local or model.rotary_base  # for transformers 4
    if kind == "smollm3":
        entries["no_rope_layers"] = [int(model.has_rope(layer)) for layer in range(1, model.num_layers + 1)]
    return entries


def _expert_entries(model: ModelConfig, family: Family) -> JsonObject:
    entries: JsonObject = {}
    if family.like_deepseek:
        entries = {"first_k_dense_replace": model.num_layers - model.expert_layers, "num_nextn_predict_layers": 0}
    if family.experts is None or model.num_experts is None:
        return entries
    number, width = family.experts
    entries |= {number: model.num_experts, "num_experts_per_tok": model.moe_router_topk, width: model.expert_width}
    if not family.like_deepseek:
        return entries
    shared = model.moe_shared_expert_intermediate_size or 0
    return entries | {
        "topk_method": "noaux_tc",
        "n_shared_experts": max(shared // model.expert_width, 1),
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor,
    }


def _local_entries(model: ModelConfig, family: Family) -> JsonObject:
    switched = "use_sliding_window" in family.defaults
    if family.local is None or (switched and model.local_window is None):
        return {}
    entries: JsonObject = {"sliding_window": model.local_window}
    if family.local == "some":
        entries["sliding_window"] = model.local_window or 4096  # needed even if no layer is local
        entries["layer_types"] = [_LOCAL if is_local else _GLOBAL for is_local in _local_layers(model)]
    if switched:
        entries |= {"use_sliding_window": True, "max_window_layers": 0}
    return entries


def _local_layers(model: ModelConfig) -> list[bool]:
    """Return whether each layer is local."""
    if model.local_window is None:
        return [False] * model.num_layers
    every = model.window_attn_skip_freq
    return [every is None or layer % every != 0 for layer in range(1, model.num_layers + 1)]


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the options by which the results of two models differ, except the base and the scaling of RoPE."""
    options = vars(comparable(model))
    other_options = vars(comparable(other))
    names = [name for name in options if name != "rotary_base" and not name.startswith("rope_")]
    return [name for name in names if options[name] != other_options[name]]


def rope_changes(before: ModelConfig, now: ModelConfig) -> list[str]:
    """Return the base, the scaling and its options where they differ, as "rotary_base 500000.0 -> 8000000.0"."""
    names = ["rotary_base", "rope_scaling"]
    if before.rope_scaling == now.rope_scaling != "none":
        names += [name for name in vars(now) if name.startswith("rope_") and name not in (*names, "rope_window_bases")]
    return [
        f"{name} {getattr(before, name)} -> {getattr(now, name)}"
        for name in names
        if getattr(before, name) != getattr(now, name)
    ]


def comparable(model: ModelConfig) -> ModelConfig:
    """Return the model without the options, or spellings of them, that do not affect its results."""
    if model.num_experts is not None:
        model = replace(model, moe_ffn_hidden_size=model.expert_width)
    if model.expert_layers == model.num_layers:  # no layer has a single MLP
        model = replace(model, ffn_hidden_size=model.expert_width, moe_layer_freq=())
    if not any(_local_layers(model)):
        model = replace(model, local_window=None, rotary_base_local=None)
    if model.rotary_base_local == model.rotary_base and model.rope_scaling == "none":
        model = replace(model, rotary_base_local=None)
    if all(_local_layers(model)) or model.local_window is None:
        model = replace(model, window_attn_skip_freq=None)
    if (model.no_rope_freq or 0) > model.num_layers:
        model = replace(model, no_rope_freq=None)
    return replace(
        model,
        model_preset=None,
        init_method_std=0.02,
        init_scheme="megatron",
        hidden_dropout=0.0,
        make_vocab_size_divisible_by=1,
        kv_channels=model.head_size,
        query_pre_attn_scalar=model.query_pre_attn_scalar or model.head_size,
        add_qkv_bias=model.has_qkv_bias,
        qk_layernorm=model.has_qk_norms,
        softmax_type="learnable" if model.has_sinks else "vanilla",
    )
