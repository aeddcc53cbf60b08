"""Rules across the options of a configuration and of a run's stages, checked before any process group exists.

A rule is (options, predicate, message); options are names separated by commas. A predicate reads `o`, a `_Facts`:
`o.value` is the value of the present option. If the predicate is true for an option, the error line is "OPTION: got
VALUE" followed by the message, whose braces may name any option or derived number.
`WARNINGS` are rules for probably unintended effects, which training and a dry run print.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.cli import program
from megatron_ext.config.blocks import BLOCKS
from megatron_ext.config.mixture import MixturePart
from megatron_ext.config.options import Config
from megatron_ext.config.pipeline import balance, write_layout
from megatron_ext.config.schema import FIELDS, flag, validate
from megatron_ext.config.stages import Stage
from megatron_ext.errors import UserError
from megatron_ext.layout import check_tokens

Rule = tuple[str, Callable[[Any], Any], str]


def _shown(value: Any) -> str:
    if value in (None, ()):
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


def _if_given(names: str, is_wrong: Callable[[Any], Any], message: str) -> Rule:
    """Return a rule that rejects each of `names` if it has another value than its default, and `is_wrong`."""
    return names, lambda o: o.is_given and is_wrong(o), message


def _requires(names: str, other: str) -> Rule:
    return _if_given(names, lambda o: not o[other], f" without {other}, which it needs; add {flag(other)}")


def _excludes(names: str, other: str) -> Rule:
    return _if_given(names, lambda o: o[other], f" together with {other} {{{other}}}; leave one of them out")


def _only_with(names: str, other: str, *values: str) -> Rule:
    message = f" with {other} {{{other}}}, needs {' or '.join(values)}; leave it out"
    return _if_given(names, lambda o: o[other] not in values, message)


def _multiples(names: str, of: str) -> Rule:
    return names, lambda o: (o.value or 0) % o[of], f", needs a multiple of {of} {{{of}}}"


def _of_some_blocks(names: str) -> Rule:
    """Return a rule that rejects each of `names` if it is given with a block that does not have it."""
    message = " with block {block}, needs {blocks}; leave it out"
    return _if_given(names, lambda o: o.name not in o.traits.options, message)


_SIGMOID = ("moe_router_enable_expert_bias, moe_router_num_groups, moe_router_group_topk, "
            "moe_router_topk_scaling_factor")  # fmt: skip
_LLAMA_EXPERTS = f"moe_shared_expert_intermediate_size, moe_layer_freq, {_SIGMOID}"
_MUON = ", ".join(name for name in FIELDS if name.startswith("muon_"))
_FP8 = ", fp8_recipe {fp8_recipe} needs a multiple of {fp8_multiple} on each of"
_FP8_GATHERED = ", fp8_recipe {fp8_recipe} with sequence_parallel needs a multiple of {fp8_gathered_multiple}"
_LOWERED = "main_params_dtype, exp_avg_dtype, exp_avg_sq_dtype"
RULES: list[Rule] = [
    # the model
    ("hidden_size", lambda o: o.value % o.num_attention_heads and not o.multi_latent_attention
     and (o.kv_channels is None or o.traits.whole_width),
     ", needs a multiple of num_attention_heads {num_attention_heads}, or kv_channels (not with block gemma3)"),
    ("kv_channels", lambda o: not o.multi_latent_attention and (o.value or not o.hidden_size % o.num_attention_heads)
     and o.head_size % 2,
     "{head_size}, needs an even head size for RoPE; change hidden_size"),
    _multiples("num_attention_heads", "num_query_groups"),
    _multiples("num_attention_heads, num_query_groups, make_vocab_size_divisible_by", "tensor_model_parallel_size"),
    ("ffn_hidden_size", lambda o: (not o.num_experts or 0 in o.moe_layer_freq)
     and o.value % o.tensor_model_parallel_size,
     ", needs a multiple of tensor_model_parallel_size {tensor_model_parallel_size}"),
    _excludes("qk_layernorm", "add_qkv_bias"),
    _of_some_blocks("add_qkv_bias, qk_layernorm, no_rope_freq, rotary_percent, query_pre_attn_scalar"),
    ("softmax_type", lambda o: o.value == "learnable" and o.traits.sinks,
     " with block {block}, which has attention sinks by itself; leave it out"),
    ("attention_backend", lambda o: o.value == "flash_attn" and o.has_sinks,
     ", which has no gradient of attention sinks; use auto"),
    ("rotary_percent", lambda o: o.value != 1 and (not o.rotary_size or o.rotary_size % 2),
     ", needs an even number of a head's {head_size} dimensions; change it or kv_channels"),
    _requires("q_lora_rank, kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim, v_head_dim, rope_mscale_all_dim",
              "multi_latent_attention"),
    _excludes("block, softmax_type, kv_channels, add_qkv_bias, qk_layernorm, local_window, no_rope_freq, compile, "
              "tp_comm_overlap, fp8_format", "multi_latent_attention"),
    ("num_query_groups", lambda o: o.multi_latent_attention and o.value != o.num_attention_heads,
     " with multi_latent_attention, needs num_attention_heads {num_attention_heads}: every head has its own keys and "
     "values"),
    ("qk_pos_emb_head_dim", lambda o: o.multi_latent_attention and o.value % 2, ", needs an even number for RoPE"),
    ("v_head_dim", lambda o: o.training and o.multi_latent_attention and o.value > o.head_size,
     ", training needs at most qk_head_dim + qk_pos_emb_head_dim {head_size}"),
    # the rotary embedding
    _only_with("rope_scaling_factor", "rope_scaling", "linear", "dynamic", "yarn", "llama3"),
    _only_with("rope_original_length", "rope_scaling", "dynamic", "yarn", "llama3"),
    _only_with("rope_beta_fast, rope_beta_slow, rope_truncate, rope_attention_factor, rope_mscale_all_dim",
               "rope_scaling", "yarn"),
    _only_with("rope_low_freq_factor, rope_high_freq_factor", "rope_scaling", "llama3"),
    _only_with("rope_window_bases", "rope_scaling", "none"),
    ("rope_original_length", lambda o: o.rope_scaling in ("dynamic", "yarn", "llama3") and o.value is None,
     ", rope_scaling {rope_scaling} needs the length that the model was trained at"),
    ("rope_scaling_factor", lambda o: o.rope_scaling == "dynamic" and o.value < 1,
     ", rope_scaling dynamic needs at least 1"),
    ("rope_scaling_factor", lambda o: o.rope_scaling not in ("none", "dynamic") and o.value <= 1,
     ", rope_scaling {rope_scaling} needs more than 1 (new length / original length)"),
    ("rope_beta_fast", lambda o: o.rope_scaling == "yarn" and o.value <= o.rope_beta_slow,
     ", needs more than rope_beta_slow {rope_beta_slow}"),
    ("rope_high_freq_factor", lambda o: o.rope_scaling == "llama3" and o.value <= o.rope_low_freq_factor,
     ", needs more than rope_low_freq_factor {rope_low_freq_factor}"),
    ("rotary_base", lambda o: o.rope_scaling == "yarn" and o.value <= 1, ", rope_scaling yarn needs more than 1"),
    ("kv_channels", lambda o: o.rope_scaling in ("dynamic", "yarn") and o.rotary_size < 4,
     "{head_size}, rope_scaling {rope_scaling} needs at least 4 rotated dimensions per head"),
    ("rope_window_bases", lambda o: o.value and o.window_schedule == "constant",
     " with window_schedule constant, needs windows that change; leave it out"),
    # experts
    _requires("moe_router_topk, moe_ffn_hidden_size, expert_model_parallel_size, moe_grouped_gemm, moe_aux_loss_coeff, "
              f"moe_router_load_balancing_type, moe_router_score_function, {_LLAMA_EXPERTS}", "num_experts"),
    _of_some_blocks(f"moe_router_score_function, {_LLAMA_EXPERTS}"),
    _only_with(_SIGMOID, "moe_router_score_function", "sigmoid"),
    _requires("moe_router_bias_update_rate", "moe_router_enable_expert_bias"),
    _requires("moe_router_num_groups", "moe_router_group_topk"),
    _requires("moe_router_group_topk", "moe_router_num_groups"),
    ("moe_router_num_groups", lambda o: o.num_experts and o.value and o.moe_router_group_topk
     and (o.num_experts % o.value or o.num_experts < 2 * o.value),
     ", needs a divisor of num_experts {num_experts} with at least two experts in a group"),
    ("moe_router_group_topk", lambda o: o.value and o.moe_router_num_groups
     and not o.moe_router_topk / 2 == o.value <= o.moe_router_num_groups,
     ", needs half of moe_router_topk {moe_router_topk}, as groups are compared by their two best scores, and at most "
     "moe_router_num_groups {moe_router_num_groups}"),
    ("moe_layer_freq", lambda o: o.value and len(o.value) != o.num_layers,
     ", needs a number for each of num_layers {num_layers}"),
    ("moe_layer_freq", lambda o: o.num_experts and o.value and 1 not in o.value,
     ", needs a layer with experts; leave out num_experts instead"),
    _multiples("moe_shared_expert_intermediate_size", "tensor_model_parallel_size"),
    _of_some_blocks("num_experts"),
    ("num_experts", lambda o: o.traits.only_experts and not o.value, ", block {block} needs experts"),
    ("tensor_model_parallel_size", lambda o: o.traits.only_experts and o.traits.biases and o.value > 1,
     " with block {block}, whose experts have biases, needs 1; use --expert-model-parallel-size"),
    _excludes("add_qkv_bias, no_rope_freq, compile, tp_comm_overlap, optimizer_cpu_offload, fp8_format", "num_experts"),
    ("moe_router_topk", lambda o: o.num_experts and not 1 + o.training <= o.value <= o.num_experts,
     ", needs 2..num_experts {num_experts}: the router of a single expert has no gradient"),
    _multiples("num_experts", "expert_model_parallel_size"),
    ("moe_ffn_hidden_size", lambda o: o.num_experts and o.expert_width % o.tensor_model_parallel_size,
     "{expert_width}, needs a multiple of tensor_model_parallel_size {tensor_model_parallel_size}"),
    ("sequence_parallel", lambda o: o.training and o.num_experts and o.tensor_model_parallel_size > 1 and not o.value,
     " with num_experts {num_experts} and tensor_model_parallel_size {tensor_model_parallel_size}, needs true; add "
     "--sequence-parallel"),
    ("expert_model_parallel_size", lambda o: o.num_experts and o.is_divisible and o.replicas % o.value,
     ", needs a divisor of the {replicas} data- and context-parallel ranks of {world size} processes"),
    ("loss_denominator", lambda o: o.num_experts and o.moe_aux_loss_coeff and o.value == "weights" and o.by_losses,
     " with token_weighting {token_weighting} and moe_aux_loss_coeff {moe_aux_loss_coeff}, needs tokens"),
    # processes and pipeline
    ("sequence_parallel", lambda o: o.value and o.tensor_model_parallel_size == 1,
     " with tensor_model_parallel_size 1, needs 2; use --no-sequence-parallel"),
    ("seq_length", lambda o: o.tokens % o.context_parallel_size or (o.sequence_parallel and o.tokens % o.tpcp),
     " x micro_batch_size {micro_batch_size}, needs a multiple of context_parallel_size {context_parallel_size}, and "
     "sequence_parallel one of tensor_model_parallel_size x context_parallel_size {tpcp}"),
    ("num_query_groups", lambda o: o.context_parallel_size > 1 and o.cp_scheme == "ulysses"
     and (o.num_attention_heads % o.tpcp or (o.value % o.tpcp and o.tpcp % o.value)),
     " and {num_attention_heads} heads, cp_scheme ulysses needs a multiple or a divisor of tensor_model_parallel_size "
     "x context_parallel_size {tpcp}, and heads that are a multiple; use --cp-scheme exchange"),
    ("world size", lambda o: not o.is_divisible,
     " processes, needs a multiple of {model_parallel_size} (tensor x pipeline x context parallel size); "
     "start more with torchrun --nproc-per-node"),
    ("global_batch_size", lambda o: o.is_divisible and o.value % o.rows_at_once,
     ", needs a multiple of micro_batch_size {micro_batch_size} x data-parallel size {data_parallel_size} = "
     "{rows_at_once}"),
    ("num_layers", lambda o: not (o.layers_of_stage or o.pipeline_model_parallel_layout),
     ", needs a multiple of pipeline_model_parallel_size {pipeline_model_parallel_size}{or_layout}"),
    ("pipeline_model_parallel_layout",
     lambda o: o.value and (o.pipeline_model_parallel_size == 1 or len(o.chunks) % o.pipeline_model_parallel_size),
     " of {number_of_chunks} model chunks, needs a multiple of pipeline_model_parallel_size "
     "{pipeline_model_parallel_size}, at least 2; or none"),
    ("pipeline_model_parallel_layout", lambda o: o.value and sum(o.chunks) != o.num_layers,
     " of {layers_of_chunks} layers, needs num_layers {num_layers}; or none"),
    _excludes("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"),
    ("num_layers_per_virtual_pipeline_stage",
     lambda o: o.layers_of_stage and o.value and (o.pipeline_model_parallel_size == 1 or not o.divides_stage),
     ", needs pipeline_model_parallel_size of at least 2, and a proper divisor of a stage's {layers_of_stage} layers; "
     "leave it out"),
    ("global_batch_size",
     lambda o: o.pipeline_model_parallel_size > 1 and o.is_interleaved and o.divides_stage and o.is_divisible
     and o.microbatches % o.pipeline_model_parallel_size,
     "{microbatches} micro-batches per step, the interleaved pipeline needs a multiple of "
     "pipeline_model_parallel_size {pipeline_model_parallel_size}; raise global_batch_size"),
    ("recompute_num_layers", lambda o: o.chunks and o.recompute_granularity == "full" and (o.value > max(o.chunks)
     or (o.recompute_method == "uniform" and any(size % o.value for size in o.chunks))),
     " with recompute_method {recompute_method}, needs a divisor of the {chunk_layers} layers of a model chunk; block "
     "needs at most as many"),
    # window and local layers
    ("window_end", lambda o: o.value and o.value > o.seq_length,
     ", needs at most seq_length {seq_length}; lower it or leave it out"),
    _requires("window_attn_skip_freq, local_window_fixed, rotary_base_local", "local_window"),
    ("window_schedule", lambda o: o.local_window and o.window_attn_skip_freq is None
     and o.value != "constant" and o.local_window_fixed,
     ", which no layer follows with local_window_fixed; leave that out or add --window-attn-skip-freq N"),
    ("window_attn_skip_freq", lambda o: o.local_window and o.value is not None and not 2 <= o.value <= o.num_layers,
     ", needs 2..num_layers {num_layers}; leave it out if all layers are local"),
    # token weighting
    ("packing", lambda o: o.token_weighting == "dataset" and o.packings,
     "{packings}, token_weighting dataset needs random"),
    _only_with("score_store", "token_weighting", "frozen"),
    _only_with("short_context", "token_weighting", "unfrozen"),
    ("weight_post", lambda o: o.weighs and o.weight_score in ("longce", "exposure") and o.value != "none",
     ", weight_score {weight_score} needs none"),
    _only_with("exposure_tau, exposure_alpha, exposure_gamma", "weight_score", "exposure"),
    ("exposure_tau", lambda o: o.by_exposure and o.value and 2 * o.value > o.seq_length,
     ", needs at most half of seq_length {seq_length}, so that a row can reach the tail"),
    _if_given("weight_strength, weight_clip", lambda o: o.by_exposure,
              " with weight_score exposure, whose options are exposure_alpha and exposure_gamma; leave it out"),
    ("weight_post", lambda o: o.weighs and o.weight_score == "rho1" and o.value != "sparse",
     ", weight_score rho1 needs sparse"),
    ("weight_strength",
     lambda o: o.weighs and (o.strength < 0 or (o.strength > 1 and o.weight_post != "none")
                             or (o.strength == 0 and o.weight_post == "sparse")),
     "{strength} with weight_post {weight_post}; dense needs 0..1, sparse above 0 and at most 1, none at least 0"),
    _if_given("weight_shift", lambda o: o.weighs and o.weight_score not in ("ppmi", "npmi"),
              " with weight_score {weight_score}, needs ppmi or npmi"),
    ("score_store", lambda o: o.token_weighting == "frozen" and o.value is None,
     ", token_weighting frozen needs one; make it with {make_scores}"),
    ("weight_score", lambda o: o.token_weighting == "frozen" and not o.needs_short_losses,
     ", which compares no two losses; use --token-weighting unfrozen"),
    ("weight_score", lambda o: o.token_weighting == "unfrozen" and o.value == "rho1",
     ", which needs a reference model; use --token-weighting frozen with its score_store"),
    _if_given("short_context", lambda o: not o.needs_short_losses,
              ", which weight_score {weight_score} does not read; leave it out"),
    ("short_context", lambda o: o.scores and (o.value is None or o.value >= o.seq_length),
     ", token_weighting unfrozen needs fewer tokens than seq_length {seq_length}, such as a quarter"),
    ("short_stride", lambda o: o.scores and o.short_context and o.value and o.value > o.short_context,
     ", needs at most short_context {short_context}, or tokens between chunks would have no score"),
    # learning rate and spikes
    ("min_lr", lambda o: o.value > o.lr, ", needs at most lr {lr}"),
    ("lr_decay_iters", lambda o: o.lr_decay_style != "constant" and o.lr_first_step >= o.lr_decay_steps
     and not o.min_lr,
     "{lr_decay_steps}, but the run begins at step {lr_first_step} of the schedule, where the rate is 0; give the "
     "steps of all stages, or min_lr"),
    ("lr_warmup_iters", lambda o: o.lr_decay_style != "constant" and o.value >= o.lr_decay_steps,
     ", needs less than the {lr_decay_steps} steps of the decay (lr_decay_iters, or train_iters)"),
    ("lr_wsd_decay_iters", lambda o: o.lr_decay_style == "WSD" and o.lr_warmup_iters < o.lr_decay_steps
     and not 1 <= o.value <= o.after_warmup,
     ", WSD needs 1..{after_warmup}, the steps after warm-up"),
    ("on_spike", lambda o: o.value != "continue" and not o.spike_window,
     " with spike_window 0, needs losses to compare with; raise it"),
    _requires("early_stopping_patience, valid_data_path", "eval_interval"),
    _requires("lm_eval_tasks, lm_eval_limit, lm_eval_lengths, lm_eval_include_path, lm_eval_batch_size",
              "lm_eval_interval"),
    _requires("lm_eval_interval", "lm_eval_tasks"),
    _requires("lm_eval_interval", "tokenizer_model"),
    _excludes("lm_eval_interval", "tp_comm_overlap"),  # its buffers fit micro-batches of one size
    _excludes("lm_eval_interval", "fp8_format"),
    ("spike_window", lambda o: o.value == 1, ", needs 0 (none) or at least 2 losses for a deviation"),
    # data
    ("long_share", lambda o: o.value and (o.mixture or o.packing != "upsample_long"),
     " with a mixture or packing {packing}, needs packing upsample_long"),
    ("data_path", lambda o: o.mixture and o.value, " together with a mixture; leave one of them out"),
    ("packing", lambda o: o.mixture and not o.data_path and (o.value != "random" or o.packing_options),
     " with a mixture, whose parts have their own packings; leave it out"),
    ("data_path", lambda o: not (o.mixture or o.value),
     ", needs the prefix of a dataset, or a mixture; make a dataset with {make_dataset}"),
    # checkpoints and evaluation
    ("vocab_size", lambda o: o.value is None and o.tokenizer_model is None,
     ", needs a number or a tokenizer_model to take it from"),
    ("eval_lengths, lm_eval_lengths", lambda o: max(o.value, default=0) > o.seq_length,
     ", needs at most seq_length {seq_length}"),
    _requires("save_interval, save_seconds, async_save, keep_last", "save"),
    _requires("init_optimizer", "init_from"),
    _requires("load_if_present, load_latest_complete", "load"),
    _requires("keep_every", "keep_last"),
    ("override", lambda o: set(o.value) - FIELDS.keys(), ", needs names of options, such as lr or data_path"),
    # speed and memory
    ("overlap_param_gather", lambda o: o.optimizer == "adam" and o.value
     and not (o.use_distributed_optimizer and o.overlap_grad_reduce),
     ", needs use_distributed_optimizer and overlap_grad_reduce; set both"),
    _only_with("recompute_modules", "recompute_granularity", "selective"),
    ("recompute_modules", lambda o: "layernorm" in o.value and not o.traits.pre_mlp_norm,
     " with block {block}, whose layers have no norm before the MLP; leave layernorm out"),
    ("recompute_modules", lambda o: "mlp" in o.value and o.traits.parallel and o.fp8_format,
     " with block {block} and fp8_format, would recompute without fp8; use --recompute-granularity full"),
    _excludes("compile", "recompute_granularity"),
    ("mlp_block_tokens", lambda o: o.value and "mlp" in o.recompute_modules,
     " with recompute_modules mlp; it recomputes the MLP by itself, leave mlp out"),
    _excludes("num_experts, compile, fp8_format, tp_comm_overlap", "mlp_block_tokens"),
    ("offload_layer_inputs",
     lambda o: o.value and (o.recompute_granularity, o.recompute_method) != ("full", "uniform"),
     ", needs recompute_granularity full with recompute_method uniform"),
    _excludes("offload_layer_inputs", "fp8_format"),
    _requires("tp_comm_overlap, fp8_format, use_precision_aware_optimizer", "bf16"),
    _requires("tp_comm_overlap", "sequence_parallel"),
    ("tp_comm_overlap", lambda o: o.value
     and (o.scores or (o.eval_interval and o.eval_stride and set(o.eval_lengths) - {o.seq_length})),
     ", needs micro-batches of one size: no token_weighting unfrozen, no eval_stride with shorter eval_lengths"),
    ("hidden_size", lambda o: o.fp8_format and o.value % o.fp8_multiple, f"{_FP8} 1 ranks"),
    ("ffn_hidden_size", lambda o: o.fp8_format and o.value % (o.fp8_multiple * o.tensor_model_parallel_size),
     f"{_FP8} {{tensor_model_parallel_size}} ranks"),
    ("num_attention_heads, num_query_groups",
     lambda o: o.fp8_format and o.value * o.head_size % (o.fp8_multiple * o.tensor_model_parallel_size),
     f" heads of {{head_size}}{_FP8} {{tensor_model_parallel_size}} ranks"),
    ("seq_length", lambda o: o.fp8_format and o.tokens % (o.fp8_multiple * o.context_parallel_size),
     f" x micro_batch_size {{micro_batch_size}}{_FP8} {{context_parallel_size}} ranks"),
    ("hidden_size", lambda o: o.sequence_parallel and o.value % o.fp8_gathered_multiple, _FP8_GATHERED),
    ("seq_length", lambda o: o.sequence_parallel and o.tokens % (o.fp8_gathered_multiple * o.tpcp),
     f" x micro_batch_size {{micro_batch_size}}{_FP8_GATHERED} on each of {{tpcp}} ranks"),
    _requires("optimizer_offload_fraction", "optimizer_cpu_offload"),
    _requires(f"optimizer_cpu_offload, main_grads_dtype, {_LOWERED}", "use_precision_aware_optimizer"),
    ("use_distributed_optimizer", lambda o: o.use_precision_aware_optimizer and o.value is False,
     " with use_precision_aware_optimizer, which needs it"),
    _excludes(_LOWERED, "optimizer_cpu_offload"),
    _only_with(_MUON, "optimizer", "muon"),
    _only_with("use_precision_aware_optimizer", "optimizer", "adam"),
    ("use_distributed_optimizer, overlap_param_gather", lambda o: o.value and o.optimizer == "muon",
     " with optimizer muon, which updates whole matrices; add {no_flag}"),
]  # fmt: skip

# `cuda` is whether the device is a GPU, `transformer_engine` whether its layers are used
_NEEDS_TE = ", needs CUDA with Transformer Engine; install it or leave the option out"
PLATFORM: list[Rule] = [
    _if_given("tp_comm_overlap, moe_grouped_gemm, fp8_format", lambda o: not o.transformer_engine, _NEEDS_TE),
    # if offloaded, it is Megatron's own optimizer around torch's Adam
    ("use_precision_aware_optimizer",
     lambda o: o.value and not (o.optimizer_cpu_offload or o.transformer_engine), _NEEDS_TE),
    ("optimizer_cpu_offload", lambda o: o.value and not o.cuda, ", needs CUDA; leave it out"),
    ("compile", lambda o: o.value and o.transformer_engine,
     " with Transformer Engine's layers, which cannot be compiled; leave it out"),
]  # fmt: skip

LONG = 10**8  # number of tokens for which a crash is costly: hours on a laptop even with a tiny model
WARNINGS: list[Rule] = [
    ("save", lambda o: o.value is None and o.dump_trajectory is None,
     ", so the weights are lost at the end of the run; add --save FOLDER"),
    ("save_interval", lambda o: o.save and not (o.value or o.save_seconds)
     and o.train_iters * o.global_batch_size * o.seq_length >= LONG,
     " and save_seconds 0, so a crash or a lost node costs up to all {train_iters:,} steps; add --save-seconds 1800"),
]  # fmt: skip


class _Facts:
    """What rules read, as attributes or by name: options, properties of a configuration, and derived numbers."""

    name: str  # the option that the present rule is for
    value: Any  # the value of this option

    def __init__(self, config: Config, world_size: int) -> None:
        model = config.model
        data = config.data
        pipeline_size = config.parallel.pipeline_model_parallel_size
        self.owners = [*vars(config).values(), config]
        for section in vars(config).values():
            vars(self).update(vars(section))
        self.tpcp = self.tensor_model_parallel_size * self.context_parallel_size
        vars(self)["world size"] = world_size
        self.is_divisible = world_size % self.model_parallel_size == 0
        self.replicas = world_size // self.tensor_model_parallel_size // pipeline_size
        self.data_parallel_size = max(world_size // self.model_parallel_size, 1)
        self.rows_at_once = data.micro_batch_size * self.data_parallel_size
        self.microbatches = data.global_batch_size // self.rows_at_once
        self.tokens = data.micro_batch_size * data.seq_length
        self.layers_of_stage = 0  # if stages are not equal
        if model.num_layers % pipeline_size == 0:
            self.layers_of_stage = model.num_layers // pipeline_size
        chunk = self.num_layers_per_virtual_pipeline_stage
        self.divides_stage = not chunk or (self.layers_of_stage > chunk and self.layers_of_stage % chunk == 0)
        self.chunks: tuple[int, ...] = ()
        if self.layers_of_stage or config.parallel.pipeline_model_parallel_layout:
            self.chunks = config.parallel.layers_of_chunks(model.num_layers)
        self.number_of_chunks = len(self.chunks)
        self.layers_of_chunks = sum(self.chunks)
        self.chunk_layers = " or ".join(map(str, sorted(set(self.chunks))))
        self.or_layout = ""
        if 1 < pipeline_size <= model.num_layers + 2:
            layout = write_layout(balance(model.num_layers, pipeline_size))
            self.or_layout = f", or --pipeline-model-parallel-layout '{layout}'"
        self.weighs = self.token_weighting in ("unfrozen", "frozen")
        self.scores = self.token_weighting == "unfrozen" and self.needs_short_losses
        self.after_warmup = config.lr_decay_steps - self.lr_warmup_iters
        self.packings = " ".join(sorted({data.packing, *(part.packing for part in data.mixture)} - {"random"}))
        self.make_scores = program("score")
        self.make_dataset = program("preprocess")

    def __getattr__(self, name: str) -> Any:
        for owner in self.owners:
            if hasattr(owner, name):
                return getattr(owner, name)
        raise AttributeError(name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def is_given(self) -> bool:
        """Whether the rule's option has another value than its default."""
        return bool(self.value != FIELDS[self.name].default)

    @property
    def no_flag(self) -> str:
        """The flag that sets the rule's option to false."""
        return flag(f"no_{self.name}")

    @property
    def blocks(self) -> str:
        """The blocks that have the rule's option."""
        return " or ".join(block for block, traits in BLOCKS.items() if self.name in traits.options)


def broken(rules: Iterable[Rule], config: Config, world_size: int = 1, **facts: Any) -> Iterator[str]:
    """Yield a line for each rule that a configuration breaks, with further facts that the rules name."""
    o = _Facts(config, world_size)
    vars(o).update(facts)
    for names, is_wrong, message in rules:
        for name in names.split(", "):
            o.name = name
            o.value = o[name]
            if is_wrong(o):
                shown = ""
                if message[0] in ", ":  # otherwise the message contains the value
                    shown = _shown(o.value)
                yield f"{name}: got {shown}{message.format_map(o)}"


def mistakes(config: Config, world_size: int, *, training: bool = True) -> Iterator[str]:
    """Yield one line for each reason why `config` cannot run on `world_size` processes, in training or inference."""
    sections = {name: vars(section) for name, section in vars(config).items()}
    wrong_values = list(_raised(validate, sections))
    if wrong_values:  # of a configuration made in Python; the rules divide by these values
        yield from wrong_values
        return
    yield from broken(RULES, config, world_size, training=training)
    yield from _raised(check_tokens, config.data.micro_batch_size * config.data.seq_length)
    yield from _raised(config.window_schedule)
    yield from _raised(_check_window_bases, config)
    yield from _parts(config)


def _raised(check: Callable[..., Any], *values: Any) -> Iterator[str]:
    try:
        check(*values)
    except UserError as error:
        yield from str(error).splitlines()


def _check_window_bases(config: Config) -> None:
    model = config.model
    end = config.window_end
    table = model.window_bases()
    for window, base in table:
        is_possible = window > 0 and 0 < base < math.inf and (window < end or base == model.rotary_base)
        if not is_possible or len(dict(table)) < len(table):
            raise UserError(
                f"rope_window_bases: got {_shown(model.rope_window_bases)}, needs bases above 0 for different windows "
                f"below the last one, {end} tokens, whose base is rotary_base {model.rotary_base:g}"
            )


def _parts(config: Config) -> Iterator[str]:
    """Yield one line for each mistake in the parts of a mixture or in datasets."""
    data = config.data
    parts: list[MixturePart] = []
    try:
        if data.data_path or data.mixture:
            parts += data.parts
        labels = [part.label for part in data.mixture]
        repeated_labels = sorted({label for label in labels if labels.count(label) > 1})
        if repeated_labels:
            yield f"mixture: got several parts named {' '.join(repeated_labels)}, needs a different name for each"
        alike = [replace(part, weight=1.0) for part in parts]  # of different names: on purpose
        repeated_part = next((part.prefix for part in alike if alike.count(part) > 1), None)
        if repeated_part:
            yield (
                f"data_path, mixture: got {repeated_part} twice, packed alike; give it once, with the sum of the "
                "weights"
            )
        if data.valid_data_path:
            parts += data.valid_parts
        for part in parts:
            yield from part.mistakes(data.seq_length)
        if not config.window.document_mask and any(part.packing == "decomposition" for part in parts):
            yield "packing: got decomposition, needs document_mask to keep its pieces apart; add --document-mask"
    except UserError as error:
        yield str(error)


def check(config: Config, world_size: int, *, training: bool = True) -> None:
    """Raise UserError with one line per mistake, if there are any."""
    _refuse(list(mistakes(config, world_size, training=training)))


def _refuse(lines: Sequence[str]) -> None:
    if lines:
        raise UserError("\n".join(lines))


def check_stages(stages: Sequence[Stage], world_size: int) -> None:
    """Raise UserError with one line per mistake of any stage, if there are any."""
    lines = []
    for stage in stages:
        wrong = list(mistakes(stage.config, world_size))
        if stage.before is not None and stage.config.checkpoint.init_from is None:
            name = stage.before.name
            wrong.append(f"save: got nothing, needs a folder that holds the checkpoint of stage {name}; add --save")
        if stage.name:
            wrong = [f"stage {stage.name}: {line}" for line in wrong]
        lines += wrong
    if not lines:
        for stage in stages:
            lines += _jumps(stage)
    for name in ("device", "distributed_timeout_minutes"):  # processes are initialized once for all stages
        values = [getattr(stage.config.parallel, name) for stage in stages]
        if len(set(values)) > 1:
            got = ", ".join(f"{value} in {stage.name}" for value, stage in zip(values, stages, strict=True))
            lines.append(f"stages: {name}: got {got}; give one value for all stages")
    _refuse(lines)


def _jumps(stage: Stage) -> Iterator[str]:
    """Yield a line if a kept learning rate schedule is discontinuous, apart from a change of its peak."""
    if stage.before is None or "learning_rate" not in stage.keep:
        return
    schedule = stage.config.learning_rate_schedule()
    before = stage.before.config
    schedule_before = replace(before.learning_rate_schedule(), peak=schedule.peak, minimum=schedule.minimum)
    continues = schedule_before.at(before.training.train_iters)
    begins = schedule.at(0)
    if not math.isclose(continues, begins, rel_tol=1e-9):
        yield (
            f"stages: {stage.name}: keep: got learning_rate, but the schedule of {stage.before.name} would continue at "
            f"{continues:.4g}, and {stage.name} begins at {begins:.4g}; set the same lr_warmup_iters and "
            "lr_decay_iters, the steps of both together, for both"
        )
