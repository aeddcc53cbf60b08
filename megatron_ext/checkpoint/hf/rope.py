"""Translate the rotary entries of config.json to the rope_* fields and back, with the same frequencies (../../rope.py).

transformers' `dynamic` scaling depends on the length of each text beyond `max_position_embeddings`; in training this is
the length of the rows. So a run with longer rows is exported with the constant base that it was trained with.
"""

import math
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError, echo
from megatron_ext.files.reading import JsonObject
from megatron_ext.rope import attention_factor, follows_text, mscale, settled

# the entries that transformers reads
_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"}
_READ = {
    "default": _ALL,
    "linear": _ALL | {"factor"},
    "dynamic": _ALL | {"factor"},
    "yarn": _ALL | _YARN | {"factor", "original_max_position_embeddings"},
    "llama3": _ALL | {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
_Type = Literal["default", "linear", "dynamic", "yarn", "llama3"] | None
_Positive = Annotated[float, Field(strict=True, gt=0, le=1e300, allow_inf_nan=False)] | None
_Weight = Annotated[float, Field(strict=True, ge=0, le=1e300, allow_inf_nan=False)] | None


class _LayerAngles(TypedDict, total=False):
    """The types of rotary entries."""

    rope_type: _Type
    type: _Type
    rope_theta: _Positive
    partial_rotary_factor: _Positive
    factor: _Positive
    original_max_position_embeddings: _Positive
    low_freq_factor: _Positive
    high_freq_factor: _Positive
    beta_fast: _Positive
    beta_slow: _Positive
    attention_factor: _Positive
    mscale: _Weight
    mscale_all_dim: _Weight
    truncate: bool | None


class Angles(_LayerAngles, total=False):
    """The types of `rope_scaling` and `rope_parameters`; Gemma and Olmo have separate entries for local layers."""

    full_attention: _LayerAngles | None
    sliding_attention: _LayerAngles | None


def with_rope(model: ModelConfig, entries: JsonObject) -> ModelConfig:
    """Return the model with the rotary options of config.json; raise UserError naming one that is not supported."""
    base = _without_nulls({"rope_theta": entries.get("rope_theta")})
    scaling = _without_nulls(entries.get("rope_scaling"))
    parameters = _without_nulls(entries.get("rope_parameters"))
    if not model.traits.local_angles:
        # if both formats are present, transformers reads the old one
        return _with_angles(model, base | (scaling or parameters), entries)
    # local and global layers differ, and only the latter may be scaled; transformers ignores `type`
    angles = {"rope_type": "default"} | base | _without_nulls(parameters.get("full_attention")) | scaling
    angles.pop("truncate", None)  # transformers reads it for all kinds of layers together
    if angles["rope_type"] == "yarn":
        angles["truncate"] = parameters.get("truncate", True)
    local = {"rope_type": "default", "rope_theta": entries["rope_local_base_freq"]}
    local |= _without_nulls(parameters.get("sliding_attention"))
    model = _with_angles(model, angles, entries)
    if model.local_window is None or local == angles:
        return model
    if local["rope_type"] != "default":
        raise UserError(f"has rope_type {local['rope_type']!r} of its local layers, which are not scaled here")
    return replace(model, rotary_base_local=float(local["rope_theta"]))


def _without_nulls(entries: JsonObject | None) -> JsonObject:
    return {name: value for name, value in (entries or {}).items() if value is not None}


def _with_angles(model: ModelConfig, rope: JsonObject, entries: JsonObject) -> ModelConfig:
    scaling: str = rope.get("rope_type") or rope.get("type") or "default"
    for name, value in rope.items():
        if name not in _READ[scaling]:
            raise UserError(f"has {name} {echo(value)} in its rope_parameters, which {scaling} does not read")
    share = rope.get("partial_rotary_factor") or entries.get("partial_rotary_factor")
    if "rotary_percent" in model.traits.options:
        model = replace(model, rotary_percent=float(share or 0.5))
    elif share not in (None, 1):
        raise UserError(f"has partial_rotary_factor {echo(share)}, this model has 1.0 only; use another model")
    model = replace(model, rotary_base=float(rope.get("rope_theta", 10_000.0)))
    return replace(model, **_scaling(model, scaling, rope, entries))


def _scaling(model: ModelConfig, scaling: str, rope: JsonObject, entries: JsonObject) -> JsonObject:
    longest = entries.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings")
    if not model.traits.local_angles:
        original = entries.get("original_max_position_embeddings") or original
    if scaling == "dynamic" or not original:
        original = longest
    factor = 1.0
    if rope.get("factor") is not None:
        factor = float(rope["factor"])
    elif scaling == "yarn" and original:
        factor = (longest or original) / original
    if scaling == "default" or (scaling == "linear" and factor == 1.0):
        return {}
    options = {"rope_scaling": scaling, "rope_scaling_factor": factor}
    if scaling == "linear":
        return options
    options["rope_original_length"] = original
    if scaling == "llama3":
        options["rope_low_freq_factor"] = float(rope.get("low_freq_factor", 0))
        options["rope_high_freq_factor"] = float(rope.get("high_freq_factor", 0))
    if scaling == "yarn":
        options |= _yarn(model, factor, rope)
    return options


def _yarn(model: ModelConfig, factor: float, rope: JsonObject) -> JsonObject:
    attention = rope.get("attention_factor")
    above = rope.get("mscale")
    below = rope.get("mscale_all_dim")
    if attention is None and above and below:  # as in transformers; otherwise it is 0.1 ln factor + 1
        attention = mscale(factor, above) / mscale(factor, below)
    options = {
        "rope_beta_fast": float(rope.get("beta_fast", 32)),
        "rope_beta_slow": float(rope.get("beta_slow", 1)),
        "rope_truncate": rope.get("truncate", True),
    }
    if model.multi_latent_attention and below:  # also of the scores of all dimensions
        options["rope_mscale_all_dim"] = float(below)
        if attention is None:
            attention = mscale(factor, 1.0)
        if math.isclose(attention, mscale(factor, 1.0) / mscale(factor, below), rel_tol=1e-12):
            attention = None
    if attention is not None:
        options["rope_attention_factor"] = float(attention)
    return options


def rope_entries(model: ModelConfig, row_length: int) -> JsonObject:
    """Return the rotary entries, new and old, of a model that was trained on rows of `row_length` tokens."""
    if not follows_text(model, row_length):
        model = settled(model, row_length)
    scaling = model.rope_scaling
    entries: JsonObject = {"rope_type": "default" if scaling == "none" else scaling}
    if scaling != "none":
        entries["factor"] = model.rope_scaling_factor
    if "rotary_percent" in model.traits.options:
        entries["partial_rotary_factor"] = model.rotary_percent
    if scaling in ("yarn", "llama3"):
        entries["original_max_position_embeddings"] = model.rope_original_length
    if scaling == "llama3":
        entries |= {"low_freq_factor": model.rope_low_freq_factor, "high_freq_factor": model.rope_high_freq_factor}
    if scaling == "yarn":
        entries |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
        if not model.rope_truncate:
            entries["truncate"] = False
        if model.rope_mscale_all_dim:  # DeepSeek's own code reads no attention_factor, but the ratio of two factors
            entries |= _mscales(model)
        elif model.rope_attention_factor is not None:
            entries["attention_factor"] = model.rope_attention_factor
    parameters: JsonObject = entries | {"rope_theta": model.rotary_base}
    if model.traits.local_angles:
        local = parameters
        if model.rotary_base_local is not None:
            local = {"rope_type": "default", "rope_theta": model.rotary_base_local}
        parameters = {"full_attention": parameters, "sliding_attention": local}
        if "truncate" in entries:
            parameters["truncate"] = entries["truncate"]
    rope: JsonObject = {"max_position_embeddings": row_length, "rope_theta": model.rotary_base}
    if "partial_rotary_factor" in entries:  # for transformers 4
        rope["partial_rotary_factor"] = entries["partial_rotary_factor"]
    if scaling == "dynamic":
        rope["max_position_embeddings"] = model.rope_original_length
    if scaling != "none":
        rope["rope_scaling"] = entries
    return rope | {"rope_parameters": parameters}


def _mscales(model: ModelConfig) -> dict[str, float]:
    factor = model.rope_scaling_factor
    all_dim = model.rope_mscale_all_dim
    above = round((attention_factor(model) * mscale(factor, all_dim) - 1.0) / (0.1 * math.log(factor)), 12)
    if above > 0:
        return {"mscale": above, "mscale_all_dim": all_dim}
    return {"attention_factor": attention_factor(model), "mscale_all_dim": all_dim}
