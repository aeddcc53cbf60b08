"""Checks which rotary options go together, without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megatron_ext.config import Config, ModelConfig
from megatron_ext.errors import UserError

# the options that each scaling reads; one that is given and not read is refused
SCALING_READS = {
    "none": (),
    "linear": ("rope_scaling_factor",),
    "dynamic": ("rope_scaling_factor", "rope_original_length"),
    "yarn": (
        "rope_scaling_factor",
        "rope_original_length",
        "rope_beta_fast",
        "rope_beta_slow",
        "rope_attention_factor",
    ),
    "llama3": ("rope_scaling_factor", "rope_original_length", "rope_low_freq_factor", "rope_high_freq_factor"),
}
SCALING_OPTIONS = sorted({name for names in SCALING_READS.values() for name in names})
_DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}


def rope_mistakes(config: Config) -> Iterator[str]:
    """Yield one line for each combination of rotary options that means nothing."""
    model = config.model
    yield from _scaling(model)
    if model.no_rope_freq is not None:
        if model.no_rope_freq > model.num_layers:
            yield f"no_rope_freq: got {model.no_rope_freq}, needs at most num_layers {model.num_layers}"
        if model.no_rope_freq == 1 and (model.rope_scaling != "none" or model.rope_window_bases):
            what = "rope_window_bases" if model.rope_window_bases else f"rope_scaling {model.rope_scaling}"
            yield f"no_rope_freq: got 1, which turns all angles off, together with {what}; leave one of the two out"
    if model.rope_window_bases:
        yield from _window_bases(config)


def _scaling(model: ModelConfig) -> Iterator[str]:
    scaling, reads = model.rope_scaling, SCALING_READS[model.rope_scaling]
    for name in SCALING_OPTIONS:
        value = getattr(model, name)
        if name not in reads and value != _DEFAULTS[name]:
            readers = " or ".join(other for other, names in SCALING_READS.items() if name in names)
            yield f"{name}: got {value}, rope_scaling {scaling} does not read it; leave it out or use {readers}"
    if "rope_original_length" in reads and model.rope_original_length is None:
        yield f"rope_original_length: got nothing, rope_scaling {scaling} needs the length the model was trained at"
    factor = model.rope_scaling_factor
    if scaling == "dynamic" and factor < 1:
        yield f"rope_scaling_factor: got {factor}, rope_scaling dynamic needs at least 1"
    elif scaling not in ("none", "dynamic") and factor <= 1:
        yield f"rope_scaling_factor: got {factor}, rope_scaling {scaling} needs more than 1 (new length / old length)"
    if scaling == "yarn" and model.rope_beta_fast <= model.rope_beta_slow:
        yield f"rope_beta_fast: got {model.rope_beta_fast}, needs more than rope_beta_slow {model.rope_beta_slow}"
    if scaling == "llama3" and model.rope_high_freq_factor <= model.rope_low_freq_factor:
        low = model.rope_low_freq_factor
        yield f"rope_high_freq_factor: got {model.rope_high_freq_factor}, needs more than rope_low_freq_factor {low}"
    if scaling == "yarn" and model.rotary_base <= 1:
        yield f"rotary_base: got {model.rotary_base}, rope_scaling yarn needs more than 1"
    if scaling in ("dynamic", "yarn") and model.rotary_size < 4:
        yield f"kv_channels: got {model.head_size}, rope_scaling {scaling} needs at least 4 turned dimensions of a head"


def _window_bases(config: Config) -> Iterator[str]:
    model = config.model
    if model.rope_scaling != "none":
        yield f"rope_window_bases: got a table with rope_scaling {model.rope_scaling}, needs none; use one of the two"
    try:
        table = model.window_bases()
    except UserError as error:
        yield str(error)
        return
    end = config.window_end
    windows = [window for window, _ in table]
    for window, base in table:
        if window < 1 or not 0 < base < float("inf"):
            yield f"rope_window_bases: got {window}:{base:g}, needs a window and a base above 0"
        elif windows.count(window) > 1:
            yield f"rope_window_bases: got window {window} more than once; leave one base for it"
            return
        elif window >= end and base != model.rotary_base:
            yield (
                f"rope_window_bases: got {window}:{base:g}, needs windows below the last one, {end} tokens, whose base "
                f"is rotary_base {model.rotary_base:g}; change rotary_base or leave {window} out"
            )
    if config.window.window_schedule == "constant":
        yield "rope_window_bases: got a table with window_schedule constant, needs windows that change; leave it out"
