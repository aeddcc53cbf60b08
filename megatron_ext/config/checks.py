"""Rules across the options of a configuration and of a run's stages, checked before any process group exists.

A rule is (option, predicate, message): if the predicate is true for the options `o`, the error line is "OPTION: got
VALUE" followed by the message, whose braces may name any option or derived number. `WARNINGS` are rules for probably
unintended effects, which training and a dry run print.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from megatron_ext.cli import program
from megatron_ext.config.blocks import BLOCKS
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
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _if_given(names: str, is_wrong: Callable[[Any], Any], message: str) -> list[Rule]:
    """Return rules that reject each of `names` if it is given, as another value than its default, and `is_wrong`."""
    return [
        (name, lambda o, n=name: getattr(o, n) != FIELDS[n].default and is_wrong(o), message)  # type: ignore[misc]
        for name in names.split()
    ]


def _requires(names: str, other: str) -> list[Rule]:
    return _if_given(names, lambda o: not getattr(o, other), f" without {other}, which it needs; add {flag(other)}")


def _excludes(names: str, other: str) -> list[Rule]:
    return _if_given(names, lambda o: getattr(o, other), f" together with {other} {{{other}}}; leave one of them out")


def _only_with(names: str, other: str, *values: str) -> list[Rule]:
    message = f" with {other} {{{other}}}, needs {' or '.join(values)}; leave it out"
    return _if_given(names, lambda o: getattr(o, other) not in values, message)


def _multiples(names: str, of: str, when: Callable[[Any], Any] = lambda o: True) -> list[Rule]:
    message = f", needs a multiple of {of} {{{of}}}"
    return [
        (name, lambda o, n=name: when(o) and (getattr(o, n) or 0) % getattr(o, of), message)  # type: ignore[misc]
        for name in names.split()
    ]


def _of_some_blocks(names: str) -> list[Rule]:
    """Return rules that reject each of `names` if it is given with a block that does not have it."""
    having = {name: [block for block, traits in BLOCKS.items() if name in traits.options] for name in names.split()}
    return [rule for name, blocks in having.items() for rule in _only_with(name, "block", *blocks)]


ROPE: list[Rule] = [  # for the rotary embedding
    *_only_with("rope_scaling_factor", "rope_scaling", "linear", "dynamic", "yarn", "llama3"),
    *_only_with("rope_original_length", "rope_scaling", "dynamic", "yarn", "llama3"),
    *_only_with("rope_beta_fast rope_beta_slow rope_truncate rope_attention_factor rope_mscale_all_dim",
                "rope_scaling", "yarn"),
    *_only_with("rope_low_freq_factor rope_high_freq_factor", "rope_scaling", "llama3"),
    *_only_with("rope_window_bases", "rope_scaling", "none"),
    ("rope_original_length",
     lambda o: o.rope_scaling in ("dynamic", "yarn", "llama3") and o.rope_original_length is None,
     ", rope_scaling {rope_scaling} needs the length that the model was trained at"),
    ("rope_scaling_factor", lambda o: o.rope_scaling == "dynamic" and o.rope_scaling_factor < 1,
     ", rope_scaling dynamic needs at least 1"),
    ("rope_scaling_factor", lambda o: o.rope_scaling not in ("none", "dynamic") and o.rope_scaling_factor <= 1,
     ", rope_scaling {rope_scaling} needs more than 1 (new length / original length)"),
    ("rope_beta_fast", lambda o: o.rope_scaling == "yarn" and o.rope_beta_fast <= o.rope_beta_slow,
     ", needs more than rope_beta_slow {rope_beta_slow}"),
    ("rope_high_freq_factor",
     lambda o: o.rope_scaling == "llama3" and o.rope_high_freq_factor <= o.rope_low_freq_factor,
     ", needs more than rope_low_freq_factor {rope_low_freq_factor}"),
    ("rotary_base", lambda o: o.rope_scaling == "yarn" and o.rotary_base <= 1, ", rope_scaling yarn needs more than 1"),
    ("kv_channels", lambda o: o.rope_scaling in ("dynamic", "yarn") and o.rotary_size < 4,
     "{head_size}, rope_scaling {rope_scaling} needs at least 4 rotated dimensions per head"),
    ("rope_window_bases", lambda o: o.rope_window_bases and o.window_schedule == "constant",
     " with window_schedule constant, needs windows that change; leave it out"),
]  # fmt: skip

_SIGMOID = ("moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk "
            "moe_router_topk_scaling_factor")  # fmt: skip
_LLAMA_EXPERTS = f"moe_shared_expert_intermediate_size moe_layer_freq {_SIGMOID}"
_MUON = " ".join(name for name in FIELDS if name.startswith("muon_"))
_FP8 = ", fp8_recipe {fp8_recipe} needs a multiple of {fp8_multiple} on each of"
_LOWERED = "main_params_dtype exp_avg_dtype exp_avg_sq_dtype"
RULES: list[Rule] = [
    # the model
    ("hidden_size", lambda o: o.hidden_size % o.heads and not o.multi_latent_attention
     and (o.kv_channels is None or o.traits.whole_width),
     ", needs a multiple of num_attention_heads {heads}, or kv_channels (not with block gemma3)"),
    ("kv_channels", lambda o: not o.multi_latent_attention and (o.kv_channels or not o.hidden_size % o.heads)
     and o.head_size % 2,
     "{head_size}, needs an even head size for RoPE; change hidden_size"),
    *_multiples("num_attention_heads", "num_query_groups"),
    *_multiples("num_attention_heads num_query_groups make_vocab_size_divisible_by", "tensor_model_parallel_size"),
    *_multiples("ffn_hidden_size", "tensor_model_parallel_size", lambda o: not o.num_experts or 0 in o.moe_layer_freq),
    *_excludes("qk_layernorm", "add_qkv_bias"),
    *_of_some_blocks("add_qkv_bias qk_layernorm no_rope_freq rotary_percent query_pre_attn_scalar"),
    ("softmax_type", lambda o: o.softmax_type == "learnable" and o.traits.sinks,
     " with block {block}, which has attention sinks by itself; leave it out"),
    ("attention_backend", lambda o: o.attention_backend == "flash_attn" and o.has_sinks,
     ", which has no gradient of attention sinks; use auto"),
    ("rotary_percent", lambda o: o.rotary_percent != 1 and (not o.rotary_size or o.rotary_size % 2),
     ", needs an even number of a head's {head_size} dimensions; change it or kv_channels"),
    *_requires("q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_mscale_all_dim",
               "multi_latent_attention"),
    *_excludes("block softmax_type kv_channels add_qkv_bias qk_layernorm local_window no_rope_freq compile "
               "tp_comm_overlap fp8_format", "multi_latent_attention"),
    ("num_query_groups", lambda o: o.multi_latent_attention and o.groups != o.heads,
     " with multi_latent_attention, needs num_attention_heads {heads}: every head has its own keys and values"),
    ("qk_pos_emb_head_dim", lambda o: o.multi_latent_attention and o.qk_pos_emb_head_dim % 2,
     ", needs an even number for RoPE"),
    ("v_head_dim", lambda o: o.training and o.multi_latent_attention and o.v_head_dim > o.head_size,
     ", training needs at most qk_head_dim + qk_pos_emb_head_dim {head_size}"),
    *ROPE,
    # experts
    *_requires("moe_router_topk moe_ffn_hidden_size expert_model_parallel_size moe_grouped_gemm moe_aux_loss_coeff "
               f"moe_router_load_balancing_type moe_router_score_function {_LLAMA_EXPERTS}", "num_experts"),
    *_of_some_blocks(f"moe_router_score_function {_LLAMA_EXPERTS}"),
    *_only_with(_SIGMOID, "moe_router_score_function", "sigmoid"),
    *_requires("moe_router_bias_update_rate", "moe_router_enable_expert_bias"),
    *_requires("moe_router_num_groups", "moe_router_group_topk"),
    *_requires("moe_router_group_topk", "moe_router_num_groups"),
    ("moe_router_num_groups", lambda o: o.num_experts and o.grouped
     and (o.num_experts % o.moe_router_num_groups or o.num_experts < 2 * o.moe_router_num_groups),
     ", needs a divisor of num_experts {num_experts} with at least two experts in a group"),
    ("moe_router_group_topk", lambda o: o.grouped
     and not o.moe_router_topk / 2 == o.moe_router_group_topk <= o.moe_router_num_groups,
     ", needs half of moe_router_topk {moe_router_topk}, as groups are compared by their two best scores, and at most "
     "moe_router_num_groups {moe_router_num_groups}"),
    ("moe_layer_freq", lambda o: o.moe_layer_freq and len(o.moe_layer_freq) != o.num_layers,
     ", needs a number for each of num_layers {num_layers}"),
    ("moe_layer_freq", lambda o: o.num_experts and o.moe_layer_freq and 1 not in o.moe_layer_freq,
     ", needs a layer with experts; leave out num_experts instead"),
    *_multiples("moe_shared_expert_intermediate_size", "tensor_model_parallel_size"),
    *_of_some_blocks("num_experts"),
    ("num_experts", lambda o: o.traits.only_experts and not o.num_experts, ", block {block} needs experts"),
    ("tensor_model_parallel_size", lambda o: o.traits.only_experts and o.traits.biases and o.tp > 1,
     " with block {block}, whose experts have biases, needs 1; use --expert-model-parallel-size"),
    *_excludes("add_qkv_bias no_rope_freq compile tp_comm_overlap optimizer_cpu_offload fp8_format", "num_experts"),
    ("moe_router_topk", lambda o: o.num_experts and not 1 + o.training <= o.moe_router_topk <= o.num_experts,
     ", needs 2..num_experts {num_experts}: the router of a single expert has no gradient"),
    *_multiples("num_experts", "expert_model_parallel_size"),
    ("moe_ffn_hidden_size", lambda o: o.num_experts and o.expert_width % o.tp,
     "{expert_width}, needs a multiple of tensor_model_parallel_size {tp}"),
    ("sequence_parallel", lambda o: o.training and o.num_experts and o.tp > 1 and not o.sequence_parallel,
     " with num_experts {num_experts} and tensor_model_parallel_size {tp}, needs true; add --sequence-parallel"),
    ("expert_model_parallel_size", lambda o: o.num_experts and o.even and o.replicas % o.ep,
     ", needs a divisor of the {replicas} data- and context-parallel ranks of {world_size} processes"),
    ("loss_denominator", lambda o: o.num_experts and o.moe_aux_loss_coeff and o.loss_denominator == "weights"
     and o.by_losses,
     " with token_weighting {token_weighting} and moe_aux_loss_coeff {moe_aux_loss_coeff}, needs tokens"),
    # processes and pipeline
    ("sequence_parallel", lambda o: o.sequence_parallel and o.tp == 1,
     " with tensor_model_parallel_size 1, needs 2; use --no-sequence-parallel"),
    ("seq_length", lambda o: o.tokens % (o.tpcp if o.sequence_parallel else o.cp),
     " x micro_batch_size {micro_batch_size}, needs a multiple of context_parallel_size {cp}, and sequence_parallel "
     "one of tensor_model_parallel_size x context_parallel_size {tpcp}"),
    ("num_query_groups", lambda o: o.cp > 1 and o.cp_scheme == "ulysses"
     and (o.heads % o.tpcp or (o.groups % o.tpcp and o.tpcp % o.groups)),
     " and {heads} heads, cp_scheme ulysses needs a multiple or a divisor of tensor_model_parallel_size x "
     "context_parallel_size {tpcp}, and heads that are a multiple; use --cp-scheme exchange"),
    ("world size", lambda o: not o.even,
     "{world_size} processes, needs a multiple of {model_parallel_size} (tensor x pipeline x context parallel size); "
     "start more with torchrun --nproc-per-node"),
    ("global_batch_size", lambda o: o.even and o.global_batch_size % (o.micro_batch_size * o.dp),
     ", needs a multiple of micro_batch_size {micro_batch_size} x data-parallel size {dp} = {rows_at_once}"),
    ("num_layers", lambda o: not (o.stage or o.pipeline_model_parallel_layout),
     ", needs a multiple of pipeline_model_parallel_size {pp}{or_layout}"),
    ("pipeline_model_parallel_layout",
     lambda o: o.pipeline_model_parallel_layout and (o.pp == 1 or len(o.chunks) % o.pp),
     " of {number_of_chunks} model chunks, needs a multiple of pipeline_model_parallel_size {pp}, at least 2; or none"),
    ("pipeline_model_parallel_layout",
     lambda o: o.pipeline_model_parallel_layout and sum(o.chunks) != o.num_layers,
     " of {layers_of_chunks} layers, needs num_layers {num_layers}; or none"),
    *_excludes("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"),
    ("num_layers_per_virtual_pipeline_stage", lambda o: o.stage and o.chunk and (o.pp == 1 or not o.divides_stage),
     ", needs pipeline_model_parallel_size of at least 2, and a proper divisor of a stage's {stage} layers; leave it "
     "out"),
    ("global_batch_size", lambda o: o.pp > 1 and o.is_interleaved and o.even and o.microbatches % o.pp,
     "{microbatches} micro-batches per step, the interleaved pipeline needs a multiple of "
     "pipeline_model_parallel_size {pp}; raise global_batch_size"),
    ("recompute_num_layers",
     lambda o: o.chunks and o.recompute_granularity == "full" and
     (any(size % o.recompute_num_layers for size in o.chunks) if o.recompute_method == "uniform"
      else o.recompute_num_layers > max(o.chunks)),
     " with recompute_method {recompute_method}, needs a divisor of the {chunk_layers} layers of a model chunk; block "
     "needs at most as many"),
    # window and local layers
    ("window_end", lambda o: o.last_window > o.seq_length,
     ", needs at most seq_length {seq_length}; lower it or leave it out"),
    *_requires("window_attn_skip_freq local_window_fixed rotary_base_local", "local_window"),
    ("window_schedule", lambda o: o.local_window and o.window_attn_skip_freq is None
     and o.window_schedule != "constant" and o.local_window_fixed,
     ", which no layer follows with local_window_fixed; leave that out or add --window-attn-skip-freq N"),
    ("window_attn_skip_freq", lambda o: o.local_window and o.window_attn_skip_freq is not None
     and not 2 <= o.window_attn_skip_freq <= o.num_layers,
     ", needs 2..num_layers {num_layers}; leave it out if all layers are local"),
    # token weighting
    ("packing", lambda o: o.token_weighting == "dataset" and o.packings,
     "{packings}, token_weighting dataset needs random"),
    *_only_with("score_store", "token_weighting", "frozen"),
    *_only_with("short_context", "token_weighting", "unfrozen"),
    ("weight_post", lambda o: o.weighs and o.weight_score in ("longce", "exposure") and o.weight_post != "none",
     ", weight_score {weight_score} needs none"),
    *_only_with("exposure_tau exposure_alpha exposure_gamma", "weight_score", "exposure"),
    ("exposure_tau", lambda o: o.by_exposure and o.exposure_tau and 2 * o.exposure_tau > o.seq_length,
     ", needs at most half of seq_length {seq_length}, so that a row can reach the tail"),
    *_if_given("weight_strength weight_clip", lambda o: o.by_exposure,
               " with weight_score exposure, whose options are exposure_alpha and exposure_gamma; leave it out"),
    ("weight_post", lambda o: o.weighs and o.weight_score == "rho1" and o.weight_post != "sparse",
     ", weight_score rho1 needs sparse"),
    ("weight_strength",
     lambda o: o.weighs and (o.strength < 0 or (o.strength > 1 and o.weight_post != "none")
                             or (o.strength == 0 and o.weight_post == "sparse")),
     "{strength} with weight_post {weight_post}; dense needs 0..1, sparse above 0 and at most 1, none at least 0"),
    *_if_given("weight_shift", lambda o: o.weighs and o.weight_score not in ("ppmi", "npmi"),
               " with weight_score {weight_score}, needs ppmi or npmi"),
    ("score_store", lambda o: o.token_weighting == "frozen" and o.score_store is None,
     ", token_weighting frozen needs one; make it with {make_scores}"),
    ("weight_score", lambda o: o.token_weighting == "frozen" and not o.needs_short_losses,
     ", which compares no two losses; use --token-weighting unfrozen"),
    ("weight_score", lambda o: o.token_weighting == "unfrozen" and o.weight_score == "rho1",
     ", which needs a reference model; use --token-weighting frozen with its score_store"),
    *_if_given("short_context", lambda o: not o.needs_short_losses,
               ", which weight_score {weight_score} does not read; leave it out"),
    ("short_context", lambda o: o.scores and (o.short_context is None or o.short_context >= o.seq_length),
     ", token_weighting unfrozen needs fewer tokens than seq_length {seq_length}, such as a quarter"),
    ("short_stride", lambda o: o.scores and o.short_context and o.short_stride and o.short_stride > o.short_context,
     ", needs at most short_context {short_context}, or tokens between chunks would have no score"),
    # learning rate and spikes
    ("min_lr", lambda o: o.min_lr > o.lr, ", needs at most lr {lr}"),
    ("lr_decay_iters", lambda o: o.falls and o.lr_first_step >= o.decay and not o.min_lr,
     "{decay}, but the run begins at step {lr_first_step} of the schedule, where the rate is 0; give the steps of all "
     "stages, or min_lr"),
    ("lr_warmup_iters", lambda o: o.falls and o.lr_warmup_iters >= o.decay,
     ", needs less than the {decay} steps of the decay (lr_decay_iters, or train_iters)"),
    ("lr_wsd_decay_iters", lambda o: o.lr_decay_style == "WSD" and o.lr_warmup_iters < o.decay
     and not 1 <= o.lr_wsd_decay_iters <= o.after_warmup,
     ", WSD needs 1..{after_warmup}, the steps after warm-up"),
    ("on_spike", lambda o: o.on_spike != "continue" and not o.spike_window,
     " with spike_window 0, needs losses to compare with; raise it"),
    *_requires("early_stopping_patience valid_data_path", "eval_interval"),
    *_requires("lm_eval_tasks lm_eval_limit lm_eval_lengths lm_eval_include_path lm_eval_batch_size",
               "lm_eval_interval"),
    *_requires("lm_eval_interval", "lm_eval_tasks"),
    *_requires("lm_eval_interval", "tokenizer_model"),
    *_excludes("lm_eval_interval", "tp_comm_overlap"),  # its buffers fit micro-batches of one size
    *_excludes("lm_eval_interval", "fp8_format"),
    ("lm_eval_lengths", lambda o: max(o.lm_eval_lengths, default=0) > o.seq_length,
     ", needs at most seq_length {seq_length}"),
    ("spike_window", lambda o: o.spike_window == 1, ", needs 0 (none) or at least 2 losses for a deviation"),
    # data
    ("long_share", lambda o: o.long_share and (o.mixture or o.packing != "upsample_long"),
     " with a mixture or packing {packing}, needs packing upsample_long"),
    ("data_path", lambda o: o.mixture and o.data_path, " together with a mixture; leave one of them out"),
    ("packing", lambda o: o.mixture and not o.data_path and (o.packing != "random" or o.packing_options),
     " with a mixture, whose parts have their own packings; leave it out"),
    ("data_path", lambda o: not (o.mixture or o.data_path),
     ", needs the prefix of a dataset, or a mixture; make a dataset with {make_dataset}"),
    # checkpoints and evaluation
    ("vocab_size", lambda o: o.vocab_size is None and o.tokenizer_model is None,
     ", needs a number or a tokenizer_model to take it from"),
    ("eval_lengths", lambda o: max(o.eval_lengths, default=0) > o.seq_length,
     ", needs at most seq_length {seq_length}"),
    *_requires("save_interval save_seconds async_save keep_last", "save"),
    *_requires("init_optimizer", "init_from"),
    *_requires("load_if_present load_latest_complete", "load"),
    *_requires("keep_every", "keep_last"),
    ("override", lambda o: set(o.override) - FIELDS.keys(), ", needs names of options, such as lr or data_path"),
    # speed and memory
    ("overlap_param_gather",
     lambda o: o.optimizer == "adam" and o.overlap_param_gather
     and not (o.use_distributed_optimizer and o.overlap_grad_reduce),
     ", needs use_distributed_optimizer and overlap_grad_reduce; set both"),
    *_only_with("recompute_modules", "recompute_granularity", "selective"),
    ("recompute_modules", lambda o: "layernorm" in o.recompute_modules and not o.traits.pre_mlp_norm,
     " with block {block}, whose layers have no norm before the MLP; leave layernorm out"),
    ("recompute_modules", lambda o: "mlp" in o.recompute_modules and o.traits.parallel and o.fp8_format,
     " with block {block} and fp8_format, would recompute without fp8; use --recompute-granularity full"),
    *_excludes("compile", "recompute_granularity"),
    ("mlp_block_tokens", lambda o: o.mlp_block_tokens and "mlp" in o.recompute_modules,
     " with recompute_modules mlp; it recomputes the MLP by itself, leave mlp out"),
    *_excludes("num_experts compile fp8_format tp_comm_overlap", "mlp_block_tokens"),
    ("offload_layer_inputs",
     lambda o: o.offload_layer_inputs and (o.recompute_granularity, o.recompute_method) != ("full", "uniform"),
     ", needs recompute_granularity full with recompute_method uniform"),
    *_excludes("offload_layer_inputs", "fp8_format"),
    *_requires("tp_comm_overlap fp8_format use_precision_aware_optimizer", "bf16"),
    *_requires("tp_comm_overlap", "sequence_parallel"),
    ("tp_comm_overlap", lambda o: o.tp_comm_overlap
     and (o.scores or (o.eval_interval and o.eval_stride and set(o.eval_lengths) - {o.seq_length})),
     ", needs micro-batches of one size: no token_weighting unfrozen, no eval_stride with shorter eval_lengths"),
    ("hidden_size", lambda o: o.fp8_format and o.hidden_size % o.fp8_multiple, f"{_FP8} 1 ranks"),
    ("ffn_hidden_size", lambda o: o.fp8_format and o.ffn_hidden_size % (o.fp8_multiple * o.tp), f"{_FP8} {{tp}} ranks"),
    ("num_attention_heads", lambda o: o.fp8_format and o.heads * o.head_size % (o.fp8_multiple * o.tp),
     f" heads of {{head_size}}{_FP8} {{tp}} ranks"),
    ("num_query_groups", lambda o: o.fp8_format and o.groups * o.head_size % (o.fp8_multiple * o.tp),
     f" heads of {{head_size}}{_FP8} {{tp}} ranks"),
    ("seq_length", lambda o: o.fp8_format and o.tokens % (o.fp8_multiple * o.cp),
     f" x micro_batch_size {{micro_batch_size}}{_FP8} {{cp}} ranks"),
    *_requires("optimizer_offload_fraction", "optimizer_cpu_offload"),
    *_requires(f"optimizer_cpu_offload main_grads_dtype {_LOWERED}", "use_precision_aware_optimizer"),
    ("use_distributed_optimizer", lambda o: o.use_precision_aware_optimizer and o.use_distributed_optimizer is False,
     " with use_precision_aware_optimizer, which needs it"),
    *_excludes(_LOWERED, "optimizer_cpu_offload"),
    *_only_with(_MUON, "optimizer", "muon"),
    *_only_with("use_precision_aware_optimizer", "optimizer", "adam"),
    *((name, lambda o, n=name: getattr(o, n) and o.optimizer == "muon",
       f" with optimizer muon, which updates whole matrices; add {flag(f'no_{name}')}")
      for name in ("use_distributed_optimizer", "overlap_param_gather")),
]  # fmt: skip

# `transformer_engine` is whether its layers are used
_NEEDS_TE = ", needs CUDA with Transformer Engine; install it or leave the option out"
PLATFORM: list[Rule] = [
    *((name, lambda o, n=name: getattr(o, n) and not o.transformer_engine, _NEEDS_TE)
      for name in ("tp_comm_overlap", "moe_grouped_gemm", "fp8_format")),
    # if offloaded, it is Megatron's own optimizer around torch's Adam
    ("use_precision_aware_optimizer",
     lambda o: o.use_precision_aware_optimizer and not (o.optimizer_cpu_offload or o.transformer_engine), _NEEDS_TE),
    ("compile", lambda o: o.compile and o.transformer_engine,
     " with Transformer Engine's layers, which cannot be compiled; leave it out"),
]  # fmt: skip

LONG = 10**8  # number of tokens for which a crash is costly: hours on a laptop even with a tiny model
WARNINGS: list[Rule] = [
    ("save", lambda o: o.save is None and o.dump_trajectory is None,
     ", so the weights are lost at the end of the run; add --save FOLDER"),
    ("save_interval", lambda o: o.save and not (o.save_interval or o.save_seconds)
     and o.train_iters * o.global_batch_size * o.seq_length >= LONG,
     " and save_seconds 0, so a crash or a lost node costs up to all {train_iters:,} steps; add --save-seconds 1800"),
]  # fmt: skip


def _options(config: Config, world_size: int) -> Any:
    """Return every option by its name, and the numbers that rules derive from them."""
    o = SimpleNamespace()
    for section in vars(config).values():
        vars(o).update(vars(section))
    model, parallel, weighting, data = config.model, config.parallel, config.weighting, config.data
    o.world_size, o.traits = world_size, model.traits
    o.tp, o.pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    o.cp, o.ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
    o.tpcp, o.model_parallel_size = o.tp * o.cp, parallel.model_parallel_size
    o.even = not world_size % o.model_parallel_size
    o.dp, o.replicas = max(world_size // o.model_parallel_size, 1), world_size // o.tp // o.pp
    o.rows_at_once = data.micro_batch_size * o.dp
    o.microbatches = data.global_batch_size // o.rows_at_once
    o.heads, o.groups = model.num_attention_heads, model.num_query_groups
    o.head_size, o.rotary_size, o.expert_width = model.head_size, model.rotary_size, model.expert_width
    o.has_sinks = model.has_sinks
    o.grouped = model.moe_router_num_groups is not None and model.moe_router_group_topk is not None
    o.tokens, o.last_window = data.micro_batch_size * data.seq_length, config.window_end
    o.chunk = parallel.num_layers_per_virtual_pipeline_stage
    o.stage = 0 if model.num_layers % o.pp else model.num_layers // o.pp
    o.divides_stage = bool(o.stage and o.chunk) and not o.stage % o.chunk and o.stage != o.chunk
    is_laid_out = parallel.pipeline_model_parallel_layout is not None
    o.chunks = parallel.layers_of_chunks(model.num_layers) if o.stage or is_laid_out else ()
    o.is_interleaved = parallel.is_interleaved if is_laid_out else o.divides_stage
    o.number_of_chunks, o.layers_of_chunks = len(o.chunks), sum(o.chunks)
    o.chunk_layers = " or ".join(map(str, sorted(set(o.chunks))))
    o.or_layout = ""
    if 1 < o.pp <= model.num_layers + 2:
        o.or_layout = f", or --pipeline-model-parallel-layout '{write_layout(balance(model.num_layers, o.pp))}'"
    o.weighs = weighting.token_weighting in ("unfrozen", "frozen")
    o.by_exposure, o.by_losses = weighting.by_exposure, weighting.by_losses
    o.needs_short_losses, o.strength = weighting.needs_short_losses, weighting.strength
    o.scores = weighting.token_weighting == "unfrozen" and o.needs_short_losses
    o.decay, o.falls = config.lr_decay_steps, config.optimizer.lr_decay_style != "constant"
    o.after_warmup = o.decay - config.optimizer.lr_warmup_iters
    o.packings = " ".join(sorted({data.packing, *(part.packing for part in data.mixture)} - {"random"}))
    o.fp8_multiple = config.training.fp8_multiple
    o.make_scores, o.make_dataset = program("score"), program("preprocess")
    return o


def broken(rules: Iterable[Rule], config: Config, world_size: int = 1, **facts: Any) -> Iterator[str]:
    """Yield a line for each rule that a configuration breaks, with further facts that the rules name."""
    o = _options(config, world_size)
    vars(o).update(facts)
    for name, is_wrong, message in rules:
        if is_wrong(o):
            shown = _shown(getattr(o, name)) if message[0] in ", " else ""  # otherwise the message contains the value
            yield f"{name}: got {shown}{message.format_map(vars(o))}"


def mistakes(config: Config, world_size: int, *, training: bool = True) -> Iterator[str]:
    """Yield one line for each reason why `config` cannot run on `world_size` processes, in training or inference."""
    sections = {name: vars(section) for name, section in vars(config).items()}
    if outside := list(_raised(validate, sections)):  # of a configuration made in Python
        yield from outside
        return  # the rules divide by these values
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
    model, end = config.model, config.window_end
    table = model.window_bases()
    possible = all(window > 0 and 0 < base < math.inf for window, base in table)
    repeated = len({window for window, _ in table}) < len(table)
    if not possible or repeated or any(w >= end and base != model.rotary_base for w, base in table):
        raise UserError(
            f"rope_window_bases: got {_shown(model.rope_window_bases)}, needs bases above 0 for different windows "
            f"below the last one, {end} tokens, whose base is rotary_base {model.rotary_base:g}"
        )


def _parts(config: Config) -> Iterator[str]:
    """Yield one line for each mistake in the parts of a mixture or in datasets."""
    data = config.data
    try:
        parts = data.parts if data.data_path or data.mixture else ()
        labels = [part.label for part in data.mixture]
        if repeated := sorted({label for label in labels if labels.count(label) > 1}):
            yield f"mixture: got several parts named {' '.join(repeated)}, needs a different name for each"
        alike = [replace(part, weight=1.0) for part in parts]  # of different names: on purpose
        if twice := next((part.prefix for part in alike if alike.count(part) > 1), None):
            yield f"data_path, mixture: got {twice} twice, packed alike; give it once, with the sum of the weights"
        if data.valid_data_path:
            parts = (*parts, *data.valid_parts)
        for part in parts:
            yield from part.mistakes(data.seq_length)
        if not config.window.document_mask and any(part.packing == "decomposition" for part in parts):
            yield "packing: got decomposition, needs document_mask to keep its pieces apart; add --document-mask"
    except UserError as error:
        yield str(error)


def check(config: Config, world_size: int, *, training: bool = True) -> None:
    """Raise UserError with one line per mistake, if there are any."""
    if lines := list(mistakes(config, world_size, training=training)):
        raise UserError("\n".join(lines))


def check_stages(stages: Sequence[Stage], world_size: int) -> None:
    """Raise UserError with one line per mistake of any stage, if there are any."""
    lines = []
    for stage in stages:
        wrong = list(mistakes(stage.config, world_size))
        if stage.before is not None and stage.config.checkpoint.init_from is None:
            name = stage.before.name
            wrong.append(f"save: got nothing, needs a folder that holds the checkpoint of stage {name}; add --save")
        lines += [f"stage {stage.name}: {line}" if stage.name else line for line in wrong]
    if not lines:
        lines += [line for stage in stages for line in _jumps(stage)]
    for name in ("device", "distributed_timeout_minutes"):  # processes are initialized once for all stages
        values = [getattr(stage.config.parallel, name) for stage in stages]
        if len(set(values)) > 1:
            got = ", ".join(f"{value} in {stage.name}" for value, stage in zip(values, stages, strict=True))
            lines.append(f"stages: {name}: got {got}; give one value for all stages")
    if lines:
        raise UserError("\n".join(lines))


def _jumps(stage: Stage) -> Iterator[str]:
    """Yield a line if a kept learning rate schedule is discontinuous, apart from a change of its peak."""
    if stage.before is None or "learning_rate" not in stage.keep:
        return
    own, before = stage.config.learning_rate_schedule(), stage.before.config
    left = replace(before.learning_rate_schedule(), peak=own.peak, minimum=own.minimum)
    continues, begins = left.at(before.training.train_iters), own.at(0)
    if not math.isclose(continues, begins, rel_tol=1e-9):
        yield (
            f"stages: {stage.name}: keep: got learning_rate, but the schedule of {stage.before.name} would continue at "
            f"{continues:.4g}, and that of {stage.name} begins at {begins:.4g}; set the same lr_warmup_iters and "
            "lr_decay_iters, the steps of both together, for both"
        )
