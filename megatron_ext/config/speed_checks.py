"""Checks of the options that save memory or time in the layers and in the optimizer, against each other."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config import Config

_LOWERED = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def speed_mistakes(config: Config) -> Iterator[str]:
    """Yield one line for each pair of these options that cannot go together."""
    parallel = config.parallel
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        yield "overlap_param_gather: got true, needs use_distributed_optimizer and overlap_grad_reduce; set both"
    yield from _recomputation(config)
    yield from _offloading(config)
    yield from _tensor_overlap(config)
    yield from _fp8(config)
    yield from _optimizer(config)


def _recomputation(config: Config) -> Iterator[str]:
    parallel = config.parallel
    granularity, modules = parallel.recompute_granularity, parallel.recompute_modules
    if modules and granularity != "selective":
        yield (
            f"recompute_modules: got {' '.join(modules)} with recompute_granularity {granularity or 'none'}, "
            "needs selective; add --recompute-granularity selective"
        )
    if "layernorm" in modules and config.model.block == "phi":
        yield "recompute_modules: got layernorm with block phi, needs layers with two norms; leave it out"
    if parallel.compile and granularity is not None:
        yield (
            f"compile: got true with recompute_granularity {granularity}, needs layers that are not computed again; "
            "leave one out"
        )


def _offloading(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_layers
    number = parallel.cpu_offloading_num_layers
    if not parallel.cpu_offloading:
        if number is not None:
            yield f"cpu_offloading_num_layers: got {number} without cpu_offloading, needs it; add --cpu-offloading"
        return
    if parallel.recompute_granularity is not None:
        yield (
            f"cpu_offloading: got true with recompute_granularity {parallel.recompute_granularity}, needs layers whose "
            "activations are kept; leave one out"
        )
    if parallel.pipeline_model_parallel_size > 1:
        yield (
            "cpu_offloading: got true with pipeline_model_parallel_size "
            f"{parallel.pipeline_model_parallel_size}, needs 1; recompute instead"
        )
    if parallel.compile:
        yield "cpu_offloading: got true with compile, needs layers that are not compiled; leave one out"
    if layers < 2:
        yield f"cpu_offloading: got true with num_layers {layers}, needs at least 2: the last one's stay; leave it out"
    elif number is not None and number >= layers:
        yield f"cpu_offloading_num_layers: got {number}, needs less than num_layers {layers}: the last layer's stay"


def _tensor_overlap(config: Config) -> Iterator[str]:
    parallel, weighting, training = config.parallel, config.weighting, config.training
    if not parallel.tp_comm_overlap:
        return
    if not parallel.sequence_parallel:
        yield "tp_comm_overlap: got true without sequence_parallel, needs it; add --sequence-parallel"
    if not config.training.bf16:
        yield "tp_comm_overlap: got true without bf16, needs it; add --bf16"
    if weighting.token_weighting == "unfrozen" and weighting.needs_short_losses:
        yield (
            "tp_comm_overlap: got true with token_weighting unfrozen, needs micro-batches of one size, which short "
            "contexts are not; leave one out"
        )
    shorter = [length for length in training.eval_lengths if length != config.data.seq_length]
    if training.eval_interval and training.eval_stride is not None and shorter:
        yield (
            f"tp_comm_overlap: got true with eval_stride {training.eval_stride}, needs micro-batches of one size, "
            f"which windows of {shorter[0]} tokens are not; leave one out"
        )


def _fp8(config: Config) -> Iterator[str]:
    model, parallel, recipe = config.model, config.parallel, config.training.fp8_recipe
    if config.training.fp8_format is None:
        return
    if not config.training.bf16:
        yield f"fp8_format: got {config.training.fp8_format} without bf16, needs it; add --bf16"
    if config.training.fp8_format == "e4m3" and recipe == "delayed":
        yield "fp8_format: got e4m3 with fp8_recipe delayed, whose gradients need a wider range; use hybrid"
    if recipe == "delayed" and "layernorm" in parallel.recompute_modules:
        yield "recompute_modules: got layernorm with fp8_recipe delayed, needs another recipe; use tensorwise"
    multiple, tp, cp = fp8_multiple(config), parallel.tensor_model_parallel_size, parallel.context_parallel_size
    head, heads, groups = model.head_size, model.num_attention_heads, model.num_query_groups
    rows = config.data.micro_batch_size
    for name, got, size, shares in (
        ("hidden_size", f"{model.hidden_size}", model.hidden_size, 1),
        ("ffn_hidden_size", f"{model.ffn_hidden_size}", model.ffn_hidden_size, tp),
        ("num_attention_heads", f"{heads} heads of {head}", heads * head, tp),
        ("num_query_groups", f"{groups} heads of {head}", groups * head, tp),
        ("seq_length", f"{config.data.seq_length} x micro_batch_size {rows}", config.data.seq_length * rows, cp),
    ):
        if size % (multiple * shares):
            sharing = f"{multiple} on each of {shares} ranks" if shares > 1 else f"{multiple}"
            yield f"{name}: got {got}, fp8_recipe {recipe} needs a multiple of {sharing}; change it or leave fp8 out"


def fp8_multiple(config: Config) -> int:
    """Return what both sides of every matrix that is multiplied must be a multiple of; 1 without fp8."""
    if config.training.fp8_format is None:
        return 1
    return 32 if config.training.fp8_recipe == "mxfp8" else 16


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.optimizer_offload_fraction > 1:
        yield f"optimizer_offload_fraction: got {optimizer.optimizer_offload_fraction}, needs at most 1"
    if not optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction != 1:
        yield (
            f"optimizer_offload_fraction: got {optimizer.optimizer_offload_fraction} without optimizer_cpu_offload, "
            "needs it; add --optimizer-cpu-offload"
        )
    lowered = [name for name in _LOWERED if getattr(optimizer, name) != "fp32"]
    if not optimizer.use_precision_aware_optimizer:
        if optimizer.optimizer_cpu_offload:
            yield (
                "optimizer_cpu_offload: got true without use_precision_aware_optimizer, needs it; "
                "add --use-precision-aware-optimizer"
            )
        for name in lowered:
            yield (
                f"{name}: got {getattr(optimizer, name)} without use_precision_aware_optimizer, needs fp32; "
                "add --use-precision-aware-optimizer"
            )
        return
    if config.parallel.use_distributed_optimizer is False:
        yield (
            "use_distributed_optimizer: got false with use_precision_aware_optimizer, which needs it; "
            "leave --no-use-distributed-optimizer out"
        )
    if not config.training.bf16:
        yield "use_precision_aware_optimizer: got true without bf16, needs it; add --bf16"
    if optimizer.optimizer_cpu_offload:
        for name in lowered:
            if name != "main_grads_dtype":
                yield f"{name}: got {getattr(optimizer, name)} with optimizer_cpu_offload, needs fp32; leave it out"
