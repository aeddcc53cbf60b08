"""Compute the effective configuration: equivalent configurations give equal results, however they are written.

    window_end    None -> 512      omitted: replaced by the effective value
    window_rate   2.0  -> None     not read by a constant schedule: replaced by the default
    data_path     x    -> 1.0 x    several notations: replaced by one of them
    data_path 2 a 2 b  -> 0.5 a 0.5 b

The vocabulary size stays as written, because computing it would need the tokenizer (config/vocabulary.py).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TypeVar

import torch

from megatron_ext.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    WeightingConfig,
    WindowConfig,
)
from megatron_ext.config.checks import SCALING_OPTIONS, SCALING_READS
from megatron_ext.data.packing.policies import check_options
from megatron_ext.data.rows.mixture import MixturePart, scaled
from megatron_ext.data.rows.splits import parse_shares
from megatron_ext.rope import attention_factor
from megatron_ext.schedule import ScheduleKind
from megatron_ext.token_weighting.scores import LONGCE_GAMMA

Section = TypeVar(
    "Section", ModelConfig, ParallelConfig, WindowConfig, WeightingConfig, OptimizerConfig, TrainingConfig
)


def effective(config: Config) -> Config:
    """Return the configuration with effective values; it must satisfy `checks.check`."""
    return replace(
        config,
        model=_model(config.model),
        parallel=_parallel(config),
        data=_data(config.data),
        window=_window(config),
        weighting=_weighting(config.weighting),
        optimizer=_optimizer(config),
        training=_training(config.training),
    )


def _unread(section: Section, *names: str) -> Section:
    """Reset options that are not read to their defaults."""
    defaults = type(section)()
    return replace(section, **{name: getattr(defaults, name) for name in names})


def _model(model: ModelConfig) -> ModelConfig:
    reads = SCALING_READS[model.rope_scaling]
    model = _unread(model, "model_preset", *(name for name in SCALING_OPTIONS if name not in reads))
    if "rope_attention_factor" in reads:
        model = replace(model, rope_attention_factor=attention_factor(model))
    if model.init_scheme != "megatron":
        model = _unread(model, "init_method_std")
    table = model.window_bases()
    while table and table[-1][1] == model.rotary_base:  # larger windows have rotary_base anyway
        table.pop()
    if model.vocab_size is not None:  # checkpoints store the padded size
        model = replace(model, make_vocab_size_divisible_by=model.padded_vocab_size(model.vocab_size))
    if model.num_experts is not None:  # no layer has a block of this width
        model = _unread(replace(model, moe_ffn_hidden_size=model.expert_width), "ffn_hidden_size")
    return replace(
        model,
        kv_channels=model.head_size,
        rope_window_bases=tuple(f"{window}:{base!r}" for window, base in table),
    )


def _parallel(config: Config) -> ParallelConfig:
    parallel = config.parallel
    on_cuda = parallel.device == "cuda" or (parallel.device == "auto" and torch.cuda.is_available())
    parallel = replace(
        parallel,
        device="cuda" if on_cuda else "cpu",
        cp_overlap_parts=parallel.overlap_parts(on_cuda),
        # assume several ranks, because the options make no difference for one
        **asdict(config.gradient_sharing(on_cuda, 2 * parallel.model_parallel_size)),
    )
    if parallel.context_parallel_size == 1:
        parallel = _unread(parallel, "cp_policy", "cp_scheme", "cp_row_cost", "cp_overlap_parts")
    if parallel.recompute_granularity != "full":
        parallel = _unread(parallel, "recompute_method", "recompute_num_layers")
    if parallel.recompute_granularity == "selective":
        parallel = replace(parallel, recompute_modules=tuple(sorted(set(parallel.recomputed_modules))))
    if parallel.cpu_offloading:
        parallel = replace(parallel, cpu_offloading_num_layers=parallel.offloaded_layers(config.model.num_layers))
    return parallel


def _data(data: DataConfig) -> DataConfig:
    if not (data.data_path or data.mixture):  # an imported model, which was not trained here
        return data
    weights = scaled([part.weight for part in data.parts])  # only ratios matter
    parts: tuple[MixturePart, ...] = ()
    for part, weight in zip(data.parts, weights, strict=True):
        length = part.length or data.seq_length
        chosen = sorted(check_options(part.packing, part.options, length).items())
        spelled = tuple(f"{name}={value!r}" for name, value in chosen)
        parts += (replace(part, name=part.label, length=length, weight=weight, packing_options=spelled),)
    packings = {(part.packing, part.packing_options) for part in parts}
    packing, options = packings.pop() if len(packings) == 1 else ("random", ())
    shares = parse_shares(data.split)
    valid = data.valid_parts if data.valid_data_path else ()
    return replace(
        data,
        data_path=tuple(word for part in parts for word in (repr(part.weight), part.prefix)),
        valid_data_path=tuple(
            word for part in valid for word in (repr(part.weight if len(valid) > 1 else 1.0), part.prefix)
        ),
        mixture=parts,
        packing=packing,
        packing_options=options,
        long_share=None,  # included in these options
        split=",".join(str(share / sum(shares)) for share in shares),
    )


def _window(config: Config) -> WindowConfig:
    window, schedule = replace(config.window, window_end=config.window_end), config.window_schedule()
    if schedule.expansion_steps == 0:  # the window has its final size from the first step on
        window = _unread(window, "window_schedule", "window_rate", "window_expansion_fraction", "window_round_to")
        window = _unread(window, "window_aligned", "window_switch_step", "window_cycles")
        # set the first window, so that another start, with which the schedule may grow, counts as a change
        window = replace(window, window_start=schedule.end)
        # a window of the whole row is the same under every mask
        return (
            _unread(window, "window_mask", "local_window_fixed") if schedule.end == config.data.seq_length else window
        )
    if schedule.kind is ScheduleKind.CONTINUAL:
        window = _unread(window, "window_rate", "window_expansion_fraction")
    else:  # a rate and a fraction of the run are equivalent, so both are filled in
        share = float(schedule.ramp_steps / config.training.train_iters)
        window = replace(
            window, window_rate=float(schedule.gain), window_expansion_fraction=share, window_switch_step=None
        )
    if schedule.kind is not ScheduleKind.STEPWISE:
        window = _unread(window, "window_aligned")
    if schedule.kind is not ScheduleKind.STEPWISE or window.window_aligned:
        window = _unread(window, "window_round_to")
    if schedule.kind in (ScheduleKind.CYCLIC_JUMP, ScheduleKind.CYCLIC_GRADUAL):
        return replace(window, window_cycles=schedule.cycles)
    return _unread(window, "window_cycles")


def _weighting(weighting: WeightingConfig) -> WeightingConfig:
    if weighting.token_weighting in ("none", "dataset"):
        divisor = "tokens" if weighting.token_weighting == "none" else weighting.loss_denominator  # all weights are 1
        return WeightingConfig(token_weighting=weighting.token_weighting, loss_denominator=divisor)
    score, post = weighting.weight_score, weighting.weight_post
    weighting = replace(weighting, weight_strength=weighting.strength)
    if post == "none" and score not in ("focal", "mile"):  # only these use gamma
        weighting = _unread(weighting, "weight_strength")
    if score == "longce" and weighting.weight_clip is None:
        weighting = replace(weighting, weight_clip=LONGCE_GAMMA)
    if score in ("ppmi", "npmi") and weighting.weight_shift is None:
        weighting = replace(weighting, weight_shift=1.0)  # ln 1 = 0: no shift
    if weighting.token_weighting == "unfrozen" and weighting.needs_short_losses:
        return replace(weighting, short_stride=weighting.short().stride)
    return _unread(weighting, "short_context", "short_stride", "score_interval", "score_row_share")


def _training(training: TrainingConfig) -> TrainingConfig:
    if not training.fp8_format:
        training = _unread(training, "fp8_recipe")
    if not training.spike_window:
        training = _unread(training, "spike_deviations", "on_spike")
    if "skip" not in (training.on_spike, training.on_non_finite):
        training = _unread(training, "skip_limit")
    if not training.early_stopping_patience:
        training = _unread(training, "early_stopping_delta")
    if training.moe_aux_loss_coeff == 0:
        training = _unread(training, "moe_router_load_balancing_type")
    return training if training.eval_interval else _unread(training, "eval_document_mask", "eval_stride")


def _optimizer(config: Config) -> OptimizerConfig:
    optimizer = replace(config.optimizer, lr_decay_iters=config.lr_decay_steps)
    if optimizer.weight_decay == 0:
        optimizer = _unread(optimizer, "weight_decay_all")
    if optimizer.lr_decay_style == "constant":
        optimizer = _unread(optimizer, "min_lr", "lr_decay_iters")
    if optimizer.lr_decay_style != "WSD":
        optimizer = _unread(optimizer, "lr_wsd_decay_iters")
    return _unread(optimizer, "lr_warmup_from_zero") if optimizer.lr_warmup_iters == 0 else optimizer
