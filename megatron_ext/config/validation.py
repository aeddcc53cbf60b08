"""Every check of a configuration and of a run's stages, before any process group or model is made.

Each mistake is one line: field, what it got, what it needs, what to do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_ext.cli import program
from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.expert_checks import expert_mistakes
from megatron_ext.config.rope_checks import rope_mistakes
from megatron_ext.config.schema import out_of_range
from megatron_ext.config.speed_checks import speed_mistakes
from megatron_ext.config.stages import Stage
from megatron_ext.data.rows.dataset import check_samples, check_seed
from megatron_ext.errors import UserError
from megatron_ext.layout import check_tokens

FP32_MAX = (2 - 2**-23) * 2.0**127
# options of the model that only some blocks can have; the others decide by themselves, or no architecture has both
_BLOCKS_OF = {
    "add_qkv_bias": ("llama",),
    "qk_layernorm": ("llama",),
    "no_rope_freq": ("llama",),
    "rotary_percent": ("phi",),
    "rotary_base_local": ("gemma3",),
    "query_pre_attn_scalar": ("gemma3",),
}


def check_stages(stages: Sequence[Stage], world_size: int) -> None:
    """Raise UserError with one line per mistake of any stage, or return."""
    lines = []
    for stage in stages:
        wrong = list(mistakes(stage.config, world_size))
        if stage.before is not None and stage.config.checkpoint.init_from is None:
            name = stage.before.name
            wrong.append(f"save: got nothing, needs a folder that holds the checkpoint of stage {name}; add --save")
        lines += [f"stage {stage.name}: {line}" if stage.name else line for line in wrong]
    if not lines:
        lines += [line for stage in stages for line in _jumps(stage)]
    for stage, following in itertools.pairwise(stages):
        for name in ("device", "distributed_timeout_minutes"):  # the processes join once for all stages
            then, now = (getattr(config.parallel, name) for config in (stage.config, following.config))
            if now != then:
                lines.append(
                    f"stage {following.name}: {name}: got {now}, needs {then} as {stage.name} has; give one for all"
                )
    if lines:
        raise UserError("\n".join(lines))


def _jumps(stage: Stage) -> Iterator[str]:
    """Yield a line where a learning rate that is kept does not go on where it was, but for another peak."""
    if stage.before is None or "learning_rate" not in stage.keep:
        return
    own, before = stage.config.learning_rate_schedule(), stage.before.config
    left = replace(before.learning_rate_schedule(), peak=own.peak, minimum=own.minimum)
    goes_on, begins = left.at(before.training.train_iters), own.at(0)
    if not math.isclose(goes_on, begins, rel_tol=1e-9):
        yield (
            f"stages: {stage.name}: keep: got learning_rate, but the schedule of {stage.before.name} would go on at "
            f"{goes_on:.4g}, and that of {stage.name} at {begins:.4g}; give both the same decay and warm-up"
        )


def check(config: Config, world_size: int) -> None:
    """Raise UserError with one line per mistake, or return."""
    check_stages([Stage(None, config)], world_size)


def mistakes(config: Config, world_size: int) -> Iterator[str]:
    """Yield one line for each thing in `config` that cannot run on `world_size` processes."""
    alone = [line for section in vars(config).values() for line in out_of_range(section)]
    for check_number, number in ((check_seed, config.training.seed), (check_samples, config.samples)):
        try:
            check_number(number)
        except UserError as error:
            alone.append(str(error))
    yield from alone
    if alone:
        return  # the arithmetic below divides by these values
    yield from _model(config)
    yield from rope_mistakes(config)
    yield from expert_mistakes(config, world_size)
    yield from _layout(config, world_size)
    yield from _pipeline(config, world_size)
    yield from _window(config)
    yield from _weighting(config)
    yield from _optimizer(config)
    yield from _data(config)
    yield from _checkpoint(config)
    yield from speed_mistakes(config)


def _model(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None and model.hidden_size % heads:
        yield f"hidden_size: got {model.hidden_size}, needs a multiple of num_attention_heads {heads} or kv_channels"
    elif model.head_size % 2:
        yield f"kv_channels: got {model.head_size}, rotary angles need an even head size; change hidden_size"
    if heads % groups:
        yield f"num_attention_heads: got {heads}, needs a multiple of num_query_groups {groups}"
    if heads % tp:
        yield f"num_attention_heads: got {heads}, needs a multiple of tensor_model_parallel_size {tp}; lower the latter"
    if groups % tp:
        yield f"num_query_groups: got {groups}, needs a multiple of tensor_model_parallel_size {tp}; lower the latter"
    if model.num_experts is None and model.ffn_hidden_size % tp:
        yield f"ffn_hidden_size: got {model.ffn_hidden_size}, needs a multiple of tensor_model_parallel_size {tp}"
    if model.make_vocab_size_divisible_by % tp:
        yield (
            f"make_vocab_size_divisible_by: got {model.make_vocab_size_divisible_by}, "
            f"needs a multiple of tensor_model_parallel_size {tp}"
        )
    if model.qk_layernorm and model.add_qkv_bias:
        yield "qk_layernorm: got true, needs add_qkv_bias false: transformers has no model with both; leave one out"
    yield from _block(model)
    if model.attention_dropout != 0:
        yield f"attention_dropout: got {model.attention_dropout}, needs 0: packed attention has no dropout"
    if not 0 <= model.hidden_dropout < 1:
        yield f"hidden_dropout: got {model.hidden_dropout}, needs 0 <= p < 1"


def _block(model: ModelConfig) -> Iterator[str]:
    """Yield one line for each option that the block decides by itself, or that another block alone can have."""
    for name, blocks in _BLOCKS_OF.items():
        value, default = getattr(model, name), getattr(ModelConfig(), name)
        if value != default and model.block not in blocks:
            needs = f"needs {default} with block {model.block}"
            yield f"{name}: got {value}, {needs}; leave it out, or use --block {' or '.join(blocks)}"
    if model.block == "gemma3" and model.hidden_size % model.num_attention_heads:
        yield (
            f"hidden_size: got {model.hidden_size}, block gemma3 needs a multiple of num_attention_heads "
            f"{model.num_attention_heads}: transformers has no other; change it, and set kv_channels freely"
        )
    if model.rotary_base_local is not None and model.local_window is None:
        yield f"rotary_base_local: got {model.rotary_base_local}, needs local_window; leave it out"
    if model.rotary_percent != 1 and not (model.rotary_percent < 1 and model.rotary_size and not model.rotary_size % 2):
        yield (
            f"rotary_percent: got {model.rotary_percent}, needs at most 1 and an even number of the {model.head_size} "
            "dimensions of a head, at least 2; change it or kv_channels"
        )


def _layout(config: Config, world_size: int) -> Iterator[str]:
    parallel, data = config.parallel, config.data
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.sequence_parallel and tp == 1:
        yield "sequence_parallel: got true with tensor_model_parallel_size 1, needs 2; use --no-sequence-parallel"
    rows = data.micro_batch_size * data.seq_length
    try:
        check_tokens(rows)
    except UserError as error:
        yield str(error)
    tokens = f"got {data.seq_length} x micro_batch_size {data.micro_batch_size} tokens"
    if rows % cp:
        yield f"seq_length: {tokens}, needs a multiple of context_parallel_size {cp}; change seq_length"
    elif parallel.sequence_parallel and rows // cp % tp:
        yield (
            f"seq_length: {tokens}, sequence_parallel needs a multiple of tensor_model_parallel_size x "
            f"context_parallel_size {tp * cp}; change seq_length"
        )
    groups = config.model.num_query_groups
    if cp > 1 and parallel.cp_scheme == "ulysses" and groups % (tp * cp):
        yield (
            f"num_query_groups: got {groups}, cp_scheme ulysses needs a multiple of tensor_model_parallel_size x "
            f"context_parallel_size {tp * cp}; use --cp-scheme exchange"
        )
    if world_size % parallel.model_parallel_size:
        yield (
            f"world size: got {world_size} processes, needs a multiple of {parallel.model_parallel_size} "
            f"(tensor x pipeline x context parallel size); start more with torchrun --nproc-per-node"
        )
        return
    dp = config.data_parallel_size(world_size)
    if data.global_batch_size % (data.micro_batch_size * dp):
        yield (
            f"global_batch_size: got {data.global_batch_size}, needs a multiple of micro_batch_size "
            f"{data.micro_batch_size} x data-parallel size {dp} = {data.micro_batch_size * dp}"
        )


def _pipeline(config: Config, world_size: int) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    pp, chunk = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if model.num_layers % pp:
        yield f"num_layers: got {model.num_layers}, needs a multiple of pipeline_model_parallel_size {pp}"
        return
    stage = model.num_layers // pp
    if chunk is not None:
        if pp == 1:
            yield (
                "num_layers_per_virtual_pipeline_stage: got "
                f"{chunk} with pipeline_model_parallel_size 1, needs at least 2; leave it out"
            )
        elif stage % chunk or stage == chunk:
            yield (
                f"num_layers_per_virtual_pipeline_stage: got {chunk}, needs a proper divisor of the {stage} layers "
                f"of a stage (num_layers {model.num_layers} / pipeline_model_parallel_size {pp})"
            )
        elif world_size % parallel.model_parallel_size == 0 and config.microbatches(world_size) % pp:
            yield (
                f"global_batch_size: got {config.microbatches(world_size)} micro-batches per step, the interleaved "
                f"pipeline needs a multiple of pipeline_model_parallel_size {pp}; raise global_batch_size"
            )
    if parallel.recompute_granularity == "full" and parallel.recompute_num_layers > (chunk or stage):
        yield (
            f"recompute_num_layers: got {parallel.recompute_num_layers}, "
            f"needs at most the {chunk or stage} layers that a model chunk holds"
        )


def _window(config: Config) -> Iterator[str]:
    length, end = config.data.seq_length, config.window_end
    if end > length:
        yield f"window_end: got {end}, needs at most seq_length {length}; lower it or leave it out"
    else:
        try:
            config.window_schedule()
        except UserError as error:
            yield str(error)
    model, every = config.model, config.model.window_attn_skip_freq
    if model.local_window is None:
        if every is not None:
            yield f"window_attn_skip_freq: got {every} without local_window, needs both; add --local-window TOKENS"
        if config.window.local_window_fixed:
            yield "local_window_fixed: got true without local_window, needs local layers; add --local-window TOKENS"
    elif every is None:
        if config.window.window_schedule != "constant" and config.window.local_window_fixed:
            yield (
                f"window_schedule: got {config.window.window_schedule}, needs layers that follow it, but with "
                f"local_window {model.local_window} all are local and local_window_fixed keeps them as they are; "
                "leave that out, add --window-attn-skip-freq N, or use constant"
            )
    elif not 2 <= every <= model.num_layers:
        yield (
            f"window_attn_skip_freq: got {every}, needs 2..num_layers {model.num_layers} so that some layers are local "
            "and some are not; leave it out if all are local"
        )


def _weighting(config: Config) -> Iterator[str]:
    weighting = config.weighting
    source, score = weighting.token_weighting, weighting.weight_score
    if source == "dataset":
        for packing in sorted({config.data.packing, *(part.packing for part in config.data.mixture)} - {"random"}):
            yield f"packing: got {packing}, token_weighting dataset needs random; use one of the two"
    if source in ("none", "dataset"):
        for name in ("score_store", "short_context"):
            if getattr(weighting, name) is not None:
                yield (
                    f"{name}: got {getattr(weighting, name)} with token_weighting {source}, which needs none; "
                    f"leave it out, or use --token-weighting {'frozen' if name == 'score_store' else 'unfrozen'}"
                )
        return
    yield from _score(config)
    if source == "frozen":
        if not weighting.needs_short_losses:
            yield f"weight_score: got {score}, which needs no other model; use --token-weighting unfrozen"
        if weighting.score_store is None:
            yield f"score_store: got nothing, token_weighting frozen needs one; make it with {program('score')}"
        if weighting.short_context is not None:
            yield (
                f"short_context: got {weighting.short_context} with token_weighting frozen, needs none: "
                "the store knows its own; leave it out"
            )
        return
    if weighting.score_store is not None:
        yield f"score_store: got {weighting.score_store} with token_weighting unfrozen, needs none; use frozen"
    if score == "rho1":
        yield "weight_score: got rho1, which needs a reference model; use --token-weighting frozen with its score_store"
    yield from _short_context(config)


def _short_context(config: Config) -> Iterator[str]:
    weighting, length = config.weighting, config.data.seq_length
    n, s = weighting.short_context, weighting.short_stride
    if not weighting.needs_short_losses:
        for name, value, default in (
            ("short_context", n, None),
            ("score_interval", weighting.score_interval, 1),
            ("score_row_share", weighting.score_row_share, 1.0),
        ):
            if value != default:
                yield f"{name}: got {value}, weight_score {weighting.weight_score} needs none; leave it out"
        return
    if n is None:
        yield "short_context: got nothing, token_weighting unfrozen needs n tokens, such as seq_length / 4"
    elif n >= length:
        yield f"short_context: got {n}, needs less than seq_length {length}: both contexts would be the same"
    elif s is not None and s > n:
        yield f"short_stride: got {s}, needs at most short_context {n}, or tokens between chunks go unscored"
    if weighting.score_row_share > 1:
        yield f"score_row_share: got {weighting.score_row_share}, needs at most 1"


def _score(config: Config) -> Iterator[str]:
    weighting = config.weighting
    score, post, strength = weighting.weight_score, weighting.weight_post, weighting.strength
    legal = {"longce": ("none",), "rho1": ("sparse",)}.get(score, ("dense", "sparse", "none"))
    if post not in legal:
        yield f"weight_post: got {post}, weight_score {score} needs {' or '.join(legal)}"
    elif post == "dense" and not 0 <= strength <= 1:
        yield f"weight_strength: got {strength}, weight_post dense needs 0 <= lambda <= 1 (1 is uniform)"
    elif post == "sparse" and not 0 < strength <= 1:
        yield f"weight_strength: got {strength}, weight_post sparse needs 0 < kappa <= 1 (1 is uniform)"
    elif post == "none" and not strength >= 0:
        yield f"weight_strength: got {strength}, weight_post none needs gamma >= 0 (0 is uniform)"
    if weighting.weight_shift is not None:
        if score not in ("ppmi", "npmi"):
            yield f"weight_shift: got {weighting.weight_shift}, weight_score {score} needs none; use ppmi or npmi"
        elif not weighting.weight_shift >= 1:
            yield f"weight_shift: got {weighting.weight_shift}, needs k >= 1"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer, decay = config.optimizer, config.lr_decay_steps
    if optimizer.min_lr > optimizer.lr:
        yield f"min_lr: got {optimizer.min_lr}, needs at most lr {optimizer.lr}"
    if optimizer.lr_decay_style != "constant" and optimizer.lr_first_step >= decay and not optimizer.min_lr:
        yield (
            f"lr_decay_iters: got {decay}, but the run begins at step {optimizer.lr_first_step} of the schedule "
            "(lr_first_step, or keep: learning_rate), where the rate is 0; give the steps of all stages, or min_lr"
        )
    if optimizer.lr_decay_style != "constant" and optimizer.lr_warmup_iters >= decay:
        yield (
            f"lr_warmup_iters: got {optimizer.lr_warmup_iters}, needs less than the {decay} steps of the decay "
            "(lr_decay_iters, or train_iters); lower it"
        )
    elif optimizer.lr_decay_style == "WSD" and not (
        1 <= optimizer.lr_wsd_decay_iters <= decay - optimizer.lr_warmup_iters
    ):
        yield (
            f"lr_wsd_decay_iters: got {optimizer.lr_wsd_decay_iters}, WSD needs 1.."
            f"{decay - optimizer.lr_warmup_iters} steps (what is left after warm-up)"
        )
    if optimizer.qk_clip_threshold is not None:
        given = f"qk_clip_threshold: got {optimizer.qk_clip_threshold}"
        if not config.logging.attention_health_interval:
            yield f"{given}, needs scores that are measured; add --attention-health-interval 1"
        if config.model.has_qk_norms:
            yield f"{given}, needs queries and keys without norms, which undo it (qk_layernorm, gemma3); leave it out"
        if optimizer.use_precision_aware_optimizer:
            yield f"{given}, needs master weights outside of use_precision_aware_optimizer; leave one out"
    if config.training.on_spike != "continue" and not config.training.spike_window:
        yield f"on_spike: got {config.training.on_spike} with spike_window 0, needs losses to compare with; raise it"
    if config.training.early_stopping_patience and not config.training.eval_interval:
        yield (
            f"early_stopping_patience: got {config.training.early_stopping_patience} with eval_interval 0, needs "
            "validations to count; add --eval-interval N"
        )
    if config.training.spike_window == 1:
        yield "spike_window: got 1, needs 0 (none) or at least 2: a single loss has no deviation; raise it"
    for name, beta in (("adam_beta1", optimizer.adam_beta1), ("adam_beta2", optimizer.adam_beta2)):
        if not 0 <= beta < 1:
            yield f"{name}: got {beta}, needs 0 <= beta < 1"
        elif name == "adam_beta1" and not optimizer.lr / (1 - beta) <= FP32_MAX:  # what Adam's first step multiplies by
            yield (
                f"lr: got {optimizer.lr}, but lr / (1 - adam_beta1) needs to be a number of fp32, at most "
                f"{FP32_MAX:.3g}; lower it"
            )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.long_share is not None and (data.mixture or data.packing != "upsample_long"):
        packing = "a mixture, whose parts have options of their own" if data.mixture else f"packing {data.packing}"
        yield f"long_share: got {data.long_share} with {packing}, needs upsample_long; use that, or leave it out"
    if data.mixture and data.data_path:
        yield f"data_path: got {' '.join(data.data_path)} beside a mixture; give one of the two"
    elif data.mixture:
        if data.packing != "random" or data.packing_options:
            yield f"packing: got {data.packing} beside a mixture, whose parts have packings of their own; leave it out"
        labels = [part.label for part in data.mixture]
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield f"mixture: got {labels.count(label)} parts of the name {label}; give each a name of its own"
    elif not data.data_path:
        yield (
            "data_path: got nothing, needs the prefix of a dataset, or a mixture; "
            f"make a dataset with {program('preprocess')}"
        )
    try:
        parts = data.parts if data.data_path or data.mixture else ()
        if data.valid_data_path:
            parts = (*parts, *data.valid_parts)
            if not config.training.eval_interval:
                words = " ".join(data.valid_data_path)
                yield f"valid_data_path: got {words} without eval_interval, needs both; add --eval-interval N"
        for part in parts:
            yield from part.mistakes(data.seq_length)
        if not config.window.document_mask and any(part.packing == "decomposition" for part in parts):
            yield "packing: got decomposition, needs document_mask to keep its pieces apart; add --document-mask"
    except UserError as error:
        yield str(error)
    if config.model.vocab_size is None and data.tokenizer_model is None:
        yield "vocab_size: got nothing, needs a number or a tokenizer_model to take it from"
    for length in config.training.eval_lengths:
        if not 1 <= length <= data.seq_length:
            yield f"eval_lengths: got {length}, needs 1..seq_length {data.seq_length}"


def _checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    for name in ("save", "load", "init_from", "dump_trajectory"):
        if getattr(checkpoint, name) == "":
            yield f"{name}: got an empty name, needs a folder; give one, or leave it out"
    for name in ("save_interval", "save_seconds", "async_save", "keep_last"):
        value = getattr(checkpoint, name)
        if value and not checkpoint.save:
            yield f"{name}: got {value} without save, needs a run folder; add --save FOLDER"
    if checkpoint.init_optimizer and checkpoint.init_from is None:
        yield "init_optimizer: got true without init_from, needs a run or checkpoint; add --init-from FOLDER"
    for name in ("load_if_present", "load_latest_complete"):
        if getattr(checkpoint, name) and not checkpoint.load:
            yield f"{name}: got true without load, needs a run folder; add --load FOLDER"
    if checkpoint.keep_every and not checkpoint.keep_last:
        yield f"keep_every: got {checkpoint.keep_every} without keep_last, which deletes nothing; add --keep-last N"
    known = {name for section in vars(config).values() for name in vars(section)}
    for name in checkpoint.override:
        if name not in known:
            yield f"override: got {name}, needs the name of an option, such as lr or data_path"
