"""Translate the rotary entries of config.json to the rope_* fields and back, with the same frequencies (../../rope.py).

transformers' `dynamic` scaling depends on the length of each text beyond `max_position_embeddings`; in training this is
the length of the rows. So a run with longer rows is exported with the constant base that it was trained with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.checks import ROPE, broken
from megatron_ext.config.schema import invalid
from megatron_ext.errors import UserError, echo
from megatron_ext.rope import attention_factor, follows_text, mscale, settled

_ALL = {"rope_type", "type", "rope_theta"}
_PARTIAL = {"phi": 0.5}  # transformers' defaults for families with partial rotary embedding
_TWO_BASES = {"gemma3_text": (1_000_000.0, 10_000.0), "olmo3": (500_000.0, 500_000.0)}  # of global and local layers
_READ = {
    "default": _ALL,
    "linear": _ALL | {"factor"},
    "dynamic": _ALL | {"factor"},
    "yarn": _ALL
    | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
    | {"mscale", "mscale_all_dim", "truncate", "finetuned"},
    "llama3": _ALL | {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
_FIXED = {"truncate": True}
_NUMBERS = {name for names in _READ.values() for name in names} - {"rope_type", "type", "truncate", "finetuned"}


def with_rope(model: ModelConfig, entries: dict[str, Any], path: Path) -> ModelConfig:
    """Return the model with the rotary options of config.json.

    Args:
        model: the model without rotary options.
        entries: the entries of config.json.
        path: path of the file, for messages.

    Raises:
        UserError: a scaling, or one of its entries, is not supported; the message names it.
    """
    if entries["model_type"] in _TWO_BASES:
        return _with_two_bases(model, entries, path)
    return _with_one_base(model, entries, path)


def _check_numbers(rope: dict[str, Any], path: Path) -> None:
    """Check the types of entries: the scheme is a string, all others are numbers.

    Raises:
        UserError: the first invalid entry.
    """
    for name, value in rope.items():
        if value is None or isinstance(value, bool):
            continue
        if name in ("rope_type", "type"):
            if not isinstance(value, str):
                raise UserError(f"checkpoint: {path} has {name} {echo(value)}, needs one of {', '.join(_READ)}")
        elif name in _NUMBERS and not (isinstance(value, int | float) and 0 <= value < 1e300):
            raise UserError(f"checkpoint: {path} has {name} {echo(value)} in its angles, needs a number from 0 on")


def _with_two_bases(model: ModelConfig, entries: dict[str, Any], path: Path) -> ModelConfig:
    """Read Gemma's or Olmo's rotary options: local and global layers differ, and only the latter may be scaled."""
    nested, scaling = entries.get("rope_parameters") or {}, entries.get("rope_scaling") or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise UserError(
            f"checkpoint: {path} has the key 'type' in its rope_scaling, which transformers ignores in such a model; "
            "name it rope_type, or remove rope_scaling"
        )
    for kind in ("full_attention", "sliding_attention"):
        if not isinstance(nested.get(kind) or {}, dict):
            raise UserError(
                f"checkpoint: {path} has {kind} {echo(nested[kind])} in its rope_parameters, needs an object"
            )
        _check_numbers(nested.get(kind) or {}, path)
    base, local_base = _TWO_BASES[entries["model_type"]]
    if entries["model_type"] == "gemma3_text":
        local_base = entries.get("rope_local_base_freq", local_base)
    theirs = {"rope_theta": entries.get("rope_theta", base)} | (nested.get("full_attention") or {}) | scaling
    local = {"rope_theta": local_base} | (nested.get("sliding_attention") or {})
    one = {name: value for name, value in entries.items() if name not in ("rope_theta", "rope_scaling")}
    model = _with_one_base(model, one | {"rope_parameters": dict(theirs)}, path)
    kinds = [angles.get("rope_type", "default") for angles in (theirs, local)]
    if model.local_window is None or local | {"rope_type": kinds[1]} == theirs | {"rope_type": kinds[0]}:
        return model
    if kinds[1] != "default":
        raise UserError(
            f"checkpoint: {path} has rope_type {kinds[1]!r} of its local layers, which are not scaled here; "
            "use another model"
        )
    return replace(model, rotary_base_local=float(local["rope_theta"]))


def _with_one_base(model: ModelConfig, entries: dict[str, Any], path: Path) -> ModelConfig:
    # if both formats are present, transformers reads the old one
    rope = {"rope_theta": entries["rope_theta"]} if "rope_theta" in entries else {}
    rope |= entries.get("rope_scaling") or entries.get("rope_parameters") or {}
    _check_numbers(rope, path)
    share = rope.pop("partial_rotary_factor", entries.get("partial_rotary_factor"))
    share = _PARTIAL.get(str(entries["model_type"]), 1.0) if share is None else share
    if entries["model_type"] not in _PARTIAL and share != 1:
        raise UserError(
            f"checkpoint: {path} has partial_rotary_factor {echo(share)}, this model has 1.0 only; use another model"
        )
    model = replace(model, rotary_percent=float(share))
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in _READ:
        raise UserError(
            f"checkpoint: {path} has rope_type {echo(scaling)}, needs one of {', '.join(_READ)}; use another model"
        )
    for name, value in rope.items():
        fixed = value if scaling == "yarn" else _FIXED.get(name, value)
        if name not in _READ[scaling] | set(_FIXED) and value is not None:
            raise UserError(
                f"checkpoint: {path} has {name} {echo(value)} in its rope_parameters, which {scaling} does not read"
            )
        if value is not None and value != fixed:
            raise UserError(
                f"checkpoint: {path} has {name} {echo(value)}, this model has {fixed!r} only; use another model"
            )
    length = entries.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    scaled = _scaled(model, scaling, rope, length or entries.get("max_position_embeddings"), entries)
    config = Config(model=scaled)
    mistake = next(chain(invalid(config), broken(ROPE, config)), None)
    if mistake is not None:
        raise UserError(f"checkpoint: {path} has values that make no sense: {mistake}")
    return scaled


def _scaled(
    model: ModelConfig, scaling: Any, rope: dict[str, Any], original: int | None, entries: dict[str, Any]
) -> ModelConfig:
    model = replace(model, rotary_base=float(rope.get("rope_theta") or 10_000.0))
    factor = rope.get("factor")
    if factor is None and scaling == "yarn" and original:
        factor = entries.get("max_position_embeddings", original) / original
    factor = 1.0 if factor is None else float(factor)
    if scaling == "default" or (scaling == "linear" and factor == 1.0):
        return model
    model = replace(model, rope_scaling=scaling, rope_scaling_factor=factor)
    if scaling == "linear":
        return model
    if scaling == "dynamic":
        return replace(model, rope_original_length=entries.get("max_position_embeddings"))
    model = replace(model, rope_original_length=original)
    if scaling == "llama3":
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        return replace(model, rope_low_freq_factor=float(low or 0), rope_high_freq_factor=float(high or 0))
    attention, above, below = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention is None and above and below:  # as in transformers; otherwise it is 0.1 ln factor + 1
        attention = mscale(factor, above) / mscale(factor, below)
    if model.multi_latent_attention and below:  # also of the scores of all dimensions
        model = replace(model, rope_mscale_all_dim=float(below))
        attention = mscale(factor, 1.0) if attention is None else attention
        if math.isclose(attention, attention_factor(model), rel_tol=1e-12):
            attention = None
    return replace(
        model,
        rope_beta_fast=float(rope.get("beta_fast") or 32),
        rope_beta_slow=float(rope.get("beta_slow") or 1),
        rope_truncate=rope.get("truncate") is not False,
        rope_attention_factor=None if attention is None else float(attention),
    )


def rope_entries(model: ModelConfig, row_length: int) -> dict[str, Any]:
    """Return `rope_parameters`, `max_position_embeddings` and, in the old format, `rope_theta` and `rope_scaling`.

    Args:
        model: the run's model.
        row_length: L, the length of its rows.
    """
    if not follows_text(model, row_length):
        model = settled(model, row_length)
    scaling = model.rope_scaling
    entries: dict[str, Any] = {"rope_type": "default" if scaling == "none" else scaling}
    if scaling != "none":
        entries["factor"] = model.rope_scaling_factor
    if model.block == "phi":
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
    everywhere = entries | {"rope_theta": model.rotary_base}
    by_kind = {}
    if model.block in ("gemma3", "olmo3"):
        own = {"rope_type": "default", "rope_theta": model.rotary_base_local}
        local = everywhere if model.rotary_base_local is None else own
        by_kind = {"rope_parameters": {"full_attention": everywhere, "sliding_attention": local}}
    return {
        "max_position_embeddings": model.rope_original_length if scaling == "dynamic" else row_length,
        "rope_theta": model.rotary_base,
        **({"rope_scaling": entries} if scaling != "none" else {}),
        "rope_parameters": everywhere,
        **by_kind,
    }


def _mscales(model: ModelConfig) -> dict[str, float]:
    factor, all_dim = model.rope_scaling_factor, model.rope_mscale_all_dim
    above = round((attention_factor(model) * mscale(factor, all_dim) - 1.0) / (0.1 * math.log(factor)), 12)
    if above > 0:
        return {"mscale": above, "mscale_all_dim": all_dim}
    return {"attention_factor": attention_factor(model), "mscale_all_dim": all_dim}
