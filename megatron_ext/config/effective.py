"""Compute the effective configuration: equivalent configurations give equal results, however they are written.

    window_end    None -> 512      omitted: replaced by the effective value
    window_rate   2.0  -> None     not read by a constant schedule: replaced by the default
    data_path     x    -> 1.0 x    several notations: replaced by one of them
    data_path 2 a 2 b  -> 0.5 a 0.5 b

The vocabulary size stays as written, because computing it would need the tokenizer. Options that may change freely on
resuming (checkpoint/changes.py), such as those of the section `parallel`, stay as written as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from megatron_ext.config import Config, DataConfig
from megatron_ext.config.checks import SCALING_OPTIONS, SCALING_READS
from megatron_ext.config.schema import FIELDS
from megatron_ext.data.packing.policies import check_options
from megatron_ext.data.rows.mixture import MixturePart, scaled
from megatron_ext.data.rows.splits import parse_shares
from megatron_ext.rope import attention_factor
from megatron_ext.schedule import ScheduleKind
from megatron_ext.token_weighting.scores import LONGCE_GAMMA

_CYCLIC = (ScheduleKind.CYCLIC_JUMP, ScheduleKind.CYCLIC_GRADUAL)
_SCORING = "short_context short_stride score_interval score_row_share"
_WEIGHTING = f"weight_score weight_post weight_strength weight_clip weight_shift {_SCORING} score_store"
# options, and the condition under which nothing reads them
UNREAD: list[tuple[str, Callable[[Any], bool]]] = [
    ("model_preset", lambda o: True),
    *((name, lambda o, n=name: n not in SCALING_READS[o.rope_scaling]) for name in SCALING_OPTIONS),
    ("init_method_std", lambda o: o.init_scheme != "megatron"),
    ("ffn_hidden_size", lambda o: o.num_experts is not None and 0 not in o.moe_layer_freq),
    ("moe_layer_freq", lambda o: 0 not in o.moe_layer_freq),
    ("window_schedule window_rate window_expansion_fraction window_round_to window_aligned window_switch_step "
     "window_cycles", lambda o: not o.schedule.expansion_steps),
    # a window of the whole row is the same under every mask
    ("window_mask local_window_fixed", lambda o: not o.schedule.expansion_steps and o.schedule.end == o.seq_length),
    ("window_rate window_expansion_fraction", lambda o: o.schedule.kind is ScheduleKind.CONTINUAL),
    ("window_switch_step", lambda o: o.schedule.kind is not ScheduleKind.CONTINUAL),
    ("window_aligned", lambda o: o.schedule.kind is not ScheduleKind.STEPWISE),
    ("window_round_to", lambda o: o.schedule.kind is not ScheduleKind.STEPWISE or o.window_aligned),
    ("window_cycles", lambda o: o.schedule.kind not in _CYCLIC),
    (_WEIGHTING, lambda o: o.token_weighting in ("none", "dataset")),
    ("loss_denominator", lambda o: o.token_weighting == "none"),  # all weights are 1
    ("weight_strength", lambda o: o.weight_post == "none" and o.weight_score not in ("focal", "mile")),
    (_SCORING, lambda o: o.token_weighting != "unfrozen" or o.weight_score in ("focal", "mile")),
    ("weight_decay_all", lambda o: o.weight_decay == 0),
    ("min_lr lr_decay_iters", lambda o: o.lr_decay_style == "constant"),
    ("lr_wsd_decay_iters", lambda o: o.lr_decay_style != "WSD"),
    ("lr_warmup_from_zero", lambda o: o.lr_warmup_iters == 0),
    ("fp8_recipe", lambda o: o.fp8_format is None),
    ("moe_router_load_balancing_type", lambda o: o.moe_aux_loss_coeff == 0),
]  # fmt: skip


def effective(config: Config) -> Config:
    """Return the configuration with effective values; it must satisfy `checks.check`."""
    o = SimpleNamespace(schedule=config.window_schedule())
    for options in vars(config).values():
        vars(o).update(vars(options))
    values = dict(_written_out(config))
    for names, is_unread in UNREAD:
        if is_unread(o):
            values |= {name: FIELDS[name].default for name in names.split()}
    sections = {
        section: replace(options, **{name: value for name, value in values.items() if name in vars(options)})
        for section, options in vars(config).items()
    }
    return replace(config, **sections | {"data": _data(config.data)})


def _written_out(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the effective values of options that may be omitted or have several notations."""
    model, weighting, schedule = config.model, config.weighting, config.window_schedule()
    if not model.multi_latent_attention:
        yield "kv_channels", model.head_size
    if model.rope_scaling == "yarn":
        yield "rope_attention_factor", attention_factor(model)
    table = model.window_bases()
    while table and table[-1][1] == model.rotary_base:  # larger windows have rotary_base anyway
        table.pop()
    yield "rope_window_bases", tuple(f"{window}:{base!r}" for window, base in table)
    if model.vocab_size is not None:  # checkpoints store the padded size
        yield "make_vocab_size_divisible_by", model.padded_vocab_size(model.vocab_size)
    if model.num_experts is not None:
        yield "moe_ffn_hidden_size", model.expert_width

    yield "window_end", schedule.end
    yield "window_cycles", schedule.cycles
    if schedule.expansion_steps:  # a rate and a fraction of the run are equivalent, so both are filled in
        yield "window_rate", schedule.rate
        yield "window_expansion_fraction", float(schedule.ramp_steps / config.training.train_iters)
    else:  # set the first window, so that another start, with which the schedule may grow, counts as a change
        yield "window_start", schedule.end

    yield "weight_strength", weighting.strength
    if weighting.weight_score == "longce" and weighting.weight_clip is None:
        yield "weight_clip", LONGCE_GAMMA
    if weighting.weight_score in ("ppmi", "npmi") and weighting.weight_shift is None:
        yield "weight_shift", 1.0  # ln 1 = 0: no shift
    if weighting.short_context is not None:
        yield "short_stride", weighting.short().stride
    yield "lr_decay_iters", config.lr_decay_steps


def _data(data: DataConfig) -> DataConfig:
    if not (data.data_path or data.mixture):  # an imported model, which was not trained here
        return data
    weights = scaled([part.weight for part in data.parts])  # only ratios matter
    parts: tuple[MixturePart, ...] = ()
    for part, weight in zip(data.parts, weights, strict=True):
        length = part.length or data.seq_length
        chosen = sorted(asdict(check_options(part.packing, part.options, length)).items())
        spelled = tuple(f"{name}={value!r}" for name, value in chosen)
        parts += (replace(part, name=part.label, length=length, weight=weight, packing_options=spelled),)
    packings = {(part.packing, part.packing_options) for part in parts}
    packing, options = packings.pop() if len(packings) == 1 else ("random", ())
    shares = parse_shares(data.split)
    return replace(
        data,
        data_path=tuple(word for part in parts for word in (repr(part.weight), part.prefix)),
        mixture=parts,
        packing=packing,
        packing_options=options,
        long_share=None,  # included in these options
        split=",".join(str(share / sum(shares)) for share in shares),
    )
