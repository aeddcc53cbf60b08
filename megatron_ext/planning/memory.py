"""Estimates the memory of one GPU from the configuration alone, by the formulas of docs/planning.md.

Legend: t tokens of this rank, D hidden, F inside the SwiGLU block, N query heads, G key heads, H head size; tp, pp, cp
and dp the tensor-, pipeline-, context- and data-parallel sizes; e the bytes of a number (bf16: 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from megatron_ext.checkpoint.hf.names import Cut, full_shape, parameters_of
from megatron_ext.cli import program
from megatron_ext.config import Config, ModelConfig
from megatron_ext.planning.attention_memory import attention_backward, attention_bytes, recomputed_modules
from megatron_ext.planning.attention_shapes import Shapes, attention_shapes

HEADROOM = 0.15  # share of a GPU's memory to leave for CUDA's context, NCCL's buffers and fragmentation
_EMBEDDING = "model.embed_tokens.weight"
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Memory:
    """Holds the bytes on one GPU of a pipeline stage, part by part.

    Attributes:
        weights: the parameters as they compute.
        gradients: fp32 unless the precision-aware optimizer is told otherwise.
        optimizer: Adam's moments, and in bf16 runs the master weights; what is offloaded is not on the GPU.
        batches: tokens, labels and what else a step's micro-batches hold.
        activations: what the layers keep for the backward pass, of all micro-batches in flight.
        logits: the loss head at its fullest, on the last stage.
        layer: the backward pass of one layer at its fullest: its gradients, and under full recomputation itself.
    """

    weights: int
    gradients: int
    optimizer: int
    batches: int
    activations: int
    logits: int
    layer: int

    @property
    def static(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak, in the loss head or in a layer; CUDA's context, NCCL's buffers, fragmentation on top."""
        return self.static + self.batches + self.activations + max(self.logits, self.layer)


def estimate(config: Config, world_size: int, vocab_size: int) -> Memory:
    """Return the memory of the fullest pipeline stage, under the smallest or the widest window: the larger of both."""
    stage, schedule = fullest_stage(config, world_size, vocab_size), config.window_schedule()
    windows = (schedule.start, schedule.end)
    memories = [stage_memory(config, world_size, vocab_size, stage, window) for window in windows]
    return max(memories, key=lambda memory: memory.total)


def fullest_stage(config: Config, world_size: int, vocab_size: int) -> int:
    """Return the pipeline stage that needs most, counted from 0."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(stages, key=lambda stage: stage_memory(config, world_size, vocab_size, stage).total)


def stage_memory(config: Config, world_size: int, vocab_size: int, stage: int, window: int | None = None) -> Memory:
    """Return the memory of the fullest GPU of a pipeline stage, counted from 0, under a window; None: the last one."""
    ranks = attention_shapes(config, config.window_schedule().end if window is None else window)
    memories = (_memory(config, world_size, vocab_size, stage, of_kinds) for of_kinds in dict.fromkeys(ranks))
    return max(memories, key=lambda memory: memory.total)


def fullest_rank(config: Config, world_size: int, vocab_size: int) -> int:
    """Return the first process of those that need most under the last window, counted from 0."""
    stage, parallel = fullest_stage(config, world_size, vocab_size), config.parallel
    ranks = attention_shapes(config, config.window_schedule().end)
    totals = [_memory(config, world_size, vocab_size, stage, of_kinds).total for of_kinds in ranks]
    first = stage * (world_size // parallel.pipeline_model_parallel_size)
    return first + totals.index(max(totals)) * parallel.tensor_model_parallel_size


def _memory(config: Config, world_size: int, vocab_size: int, stage: int, of_kinds: tuple[Shapes, ...]) -> Memory:
    """Return the memory of a rank whose layers, scheduled and local ones, attend in these shapes."""
    parallel, wide, masks = config.parallel, 2 if config.training.bf16 else 4, config.mask_options()
    parameters = stage_parameters(config, vocab_size, stage)
    shares = 1
    if config.gradient_sharing(parallel.device != "cpu", world_size).use_distributed_optimizer:
        shares = config.data_parallel_size(world_size) * parallel.context_parallel_size
    local = sum(map(masks.is_local, range(1, config.model.num_layers + 1))) / config.model.num_layers
    weights = (1 - local, local)
    layer = sum(weight * layer_bytes(config, kind) for weight, kind in zip(weights, of_kinds, strict=False))
    last = stage == parallel.pipeline_model_parallel_size - 1
    return Memory(
        weights=wide * parameters,
        gradients=_BYTES[config.optimizer.main_grads_dtype] * parameters,
        optimizer=math.ceil(_optimizer_bytes(config) * _parameters_with_state(config, vocab_size, stage, shares)),
        batches=_batches(config, world_size),
        activations=_activations(config, world_size, stage, math.ceil(layer), _stream_bytes(config)),
        logits=loss_head_bytes(config, vocab_size) if last else 0,
        layer=_layer_backward(config, of_kinds),
    )


def _optimizer_bytes(config: Config) -> float:
    """Return the bytes of optimizer state for a parameter: two moments, and in bf16 runs the master weight."""
    options = config.optimizer
    kept = _BYTES[options.exp_avg_dtype] + _BYTES[options.exp_avg_sq_dtype]
    kept += _BYTES[options.main_params_dtype] if config.training.bf16 else 0
    return kept * (1 - options.optimizer_offload_fraction if options.optimizer_cpu_offload else 1)


def stage_parameters(config: Config, vocab_size: int, stage: int) -> int:
    """Count the parameters that one tensor-parallel rank of a pipeline stage holds, the padded vocabulary included.

    Of experts those of an expert-parallel rank.
    """
    model, parallel = config.model, config.parallel
    last = parallel.pipeline_model_parallel_size - 1
    layers = model.num_layers // parallel.pipeline_model_parallel_size
    sizes = _sizes(model, vocab_size, parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size)
    total = sum(size for name, size in sizes.items() if "{i}" in name) * layers
    tied = not model.untie_embeddings_and_output_weights
    if stage == 0 or (tied and stage == last):  # a tied output matrix is a copy on the last stage
        total += sizes[_EMBEDDING]
    if stage == last:
        total += sum(size for name, size in sizes.items() if "{i}" not in name and name != _EMBEDDING)
    return total


def _parameters_with_state(config: Config, vocab_size: int, stage: int, shares: int) -> float:
    """Count the parameters whose optimizer state one rank has: experts are shared out over fewer ranks than the rest.

    Args:
        config, vocab_size, stage: as in `stage_parameters`.
        shares: data- and context-parallel ranks that share the rest's; 1 without a distributed optimizer.
    """
    all_here, experts = stage_parameters(config, vocab_size, stage), _expert_parameters(config)
    copies = max(shares // config.parallel.expert_model_parallel_size, 1)
    return (all_here - experts) / shares + experts / copies


def _expert_parameters(config: Config) -> int:
    """Count the numbers in the experts of one rank of a pipeline stage, of all its layers; 0 without experts."""
    model, parallel = config.model, config.parallel
    layers = model.num_layers // parallel.pipeline_model_parallel_size
    here = (model.num_experts or 0) // parallel.expert_model_parallel_size
    return layers * here * 3 * model.hidden_size * model.expert_width // parallel.tensor_model_parallel_size


@cache
def _sizes(model: ModelConfig, vocab_size: int, tensor_size: int, expert_size: int) -> Mapping[str, int]:
    """Count the numbers on one rank of each parameter of the name table, of all the rank's experts together.

    `{i}` stands for any layer.
    """
    sizes = {}
    for parameter in parameters_of(model):
        ranks = 1 if parameter.cut is Cut.WHOLE else tensor_size
        copies = (model.num_experts or 0) // expert_size if parameter.of_experts else 1
        for name in parameter.hugging_face:
            shape = full_shape(name, model, vocab_size)
            if parameter.cut is Cut.VOCABULARY:
                shape = (model.padded_vocab_size(vocab_size), *shape[1:])
            sizes[name] = copies * math.prod(shape) // ranks
    return sizes


def tokens_of(config: Config) -> int:
    """Return t."""
    return config.data.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size


def share(config: Config) -> int:
    """Return s: over how many ranks what lies between matrices is shared out."""
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


def _batches(config: Config, world_size: int) -> int:
    """Return the bytes of a step's micro-batches, which are all moved to the device at its start."""
    whole = config.data.micro_batch_size * config.data.seq_length
    per_token = 8 + 8 + 4 + 4 + 1  # token, label, position, weight, trained
    scored = 8 + 8 + 4 + 1 + 1 if config.weighting.token_weighting in ("frozen", "unfrozen") else 0  # on every rank
    return config.microbatches(world_size) * (per_token * tokens_of(config) + scored * whole)


def layer_bytes(config: Config, shapes: Shapes, *, on_cuda: bool = True) -> int:
    """Return the bytes that one layer keeps for the backward pass of a micro-batch, whatever is computed again.

    Args:
        config: the run's.
        shapes: of its attention.
        on_cuda: with its fused operators; on a CPU torch's norms keep two fp32 copies instead of what enters them, and
            the SwiGLU block 5 e F / tp, one activated factor and a copy more.
    """
    again = recomputed_modules(config)
    mlp = 0 if "mlp" in again else _mlp_bytes(config, on_cuda)
    return _norm_bytes(config, on_cuda) + mlp + attention_bytes(config, shapes)


def _norm_bytes(config: Config, on_cuda: bool) -> int:
    """Return what a layer's norms keep: what enters and leaves each, and its statistics.

    Phi has one LayerNorm. Gemma's four norms copy what enters them in fp32; what leaves the two behind attention and
    MLP is not kept. Of norms that are computed again what enters the first two alone.
    """
    hidden, e = config.model.hidden_size, 2 if config.training.bf16 else 4
    again = "layernorm" in recomputed_modules(config)
    copied = 4 * hidden + 4 if on_cuda else 8 * hidden + 4
    match config.model.block:
        case "llama":
            per_token = 2 * e * hidden if again else 2 * ((e + (e if on_cuda else 8)) * hidden + 4)
        case "phi":
            per_token = 2 * e * hidden + 8
        case "gemma3":
            per_token = 2 * copied + 2 * (e * hidden if again else copied + e * hidden)
    return math.ceil(tokens_of(config) * per_token / share(config))


def _mlp_bytes(config: Config, on_cuda: bool = True) -> int:
    """Return what the block inside two matrices keeps, in [t, F / tp]; or what router and experts keep.

    SwiGLU's kernel keeps its two factors as computed together, and the product; composed, one activated factor and a
    copy of the other as well. GELU keeps what enters and leaves it.
    """
    kept = {"llama": 3 if on_cuda else 5, "phi": 2, "gemma3": 5}[config.model.block]
    if config.model.num_experts is not None:
        return math.ceil(tokens_of(config) * expert_bytes(config, kept if on_cuda else kept + 1))
    return kept * _inner_bytes(config)


def _inner_bytes(config: Config) -> int:
    """Return the bytes of [t, F / tp]."""
    e, tp = 2 if config.training.bf16 else 4, config.parallel.tensor_model_parallel_size
    return e * tokens_of(config) * config.model.ffn_hidden_size // tp


def expert_bytes(config: Config, kept: int) -> float:
    """Return the bytes per token that a layer's router and experts keep, were the experts chosen alike.

    Of E logits: the weights of a token's experts, whole and turned, the softmax that balances and its counts, 4 bytes
    each, and two maps, (16 + 2) E / s; of each choice its number twice and its weight, 20 k / s. Of k tokens what
    enters the experts, sorted by them, e D, their weights, 4, and inside kept e F / tp. What a layer really keeps grows
    with its busiest rank's tokens: that is the router's to say.

    Args:
        config: the run's.
        kept: tensors of F numbers that a SwiGLU block keeps.
    """
    model, e, shared = config.model, 2 if config.training.bf16 else 4, share(config)
    routing = (18 * (model.num_experts or 0) + 20 * model.moe_router_topk) / shared
    inner = kept * e * model.expert_width / config.parallel.tensor_model_parallel_size
    return routing + model.moe_router_topk * (e * model.hidden_size + 4 + inner)


def _experts_at_work(config: Config) -> int:
    """Return what experts take as they compute, beside what they keep: copies of k tokens.

    As they are sent, and under expert parallelism as they arrive there or are back, shared out under sequence
    parallelism; and what leaves the experts twice, put together and put in order again. One expert alone needs neither.
    Tensor-parallel ranks add up what leaves them in the router's fp32, before and after; the buffer that gathers a
    layer's input stays.
    """
    parallel, model = config.parallel, config.model
    sent = _stream_bytes(config) * model.moe_router_topk
    left = sent * share(config)
    taken = sent if parallel.expert_model_parallel_size == 1 else 2 * sent
    taken += left if model.num_experts == parallel.expert_model_parallel_size else 2 * left
    if parallel.tensor_model_parallel_size > 1:
        taken += (left + sent) * 4 // (2 if config.training.bf16 else 4) + _stream_bytes(config) * share(config)
    return taken


def final_norm_bytes(config: Config, *, on_cuda: bool = True) -> int:
    """Return the bytes that the last norm keeps beside its output: its input, or fp32 copies, and statistics."""
    e = 2 if config.training.bf16 else 4
    kept = {"llama": e, "phi": e, "gemma3": 4}[config.model.block] if on_cuda else 8
    statistics = 8 if config.model.block == "phi" else 4
    return math.ceil(tokens_of(config) * (kept * config.model.hidden_size + statistics) / share(config))


def _activations(config: Config, world_size: int, stage: int, whole: int, stream: int) -> int:
    """Return the bytes that the layers of a pipeline stage keep for all micro-batches in flight.

    Full recomputation keeps the residual stream that enters each group of layers. What a stage hands on is kept until
    its gradient has come; an interleaved pipeline receives the next stream and the next gradient ahead.

    Args:
        config, world_size, stage: as `stage_memory` takes them.
        whole: of one layer without full recomputation.
        stream: of the residual stream.
    """
    model, parallel = config.model, config.parallel
    pp = parallel.pipeline_model_parallel_size
    chunk = parallel.num_layers_per_virtual_pipeline_stage or model.num_layers // pp
    chunks = model.num_layers // pp // chunk
    # 1F1B keeps pp - stage micro-batches before its first backward pass; interleaved chunks warm up longer.
    flights = pp - stage if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    flights = min(flights, config.microbatches(world_size) * chunks)
    handed = 0 if stage == pp - 1 and chunks == 1 else flights * stream
    if chunks > 1:
        handed += 2 * stream
    layers = flights * chunk - parallel.offloaded_layers(model.num_layers)
    if parallel.recompute_granularity != "full":
        return layers * whole + handed
    group = parallel.recompute_num_layers
    angles = 4 * model.head_size * tokens_of(config)  # fp32, the same ones for all layers
    if parallel.recompute_method == "uniform":
        return math.ceil(layers / group) * stream + angles + handed
    recomputed = math.ceil(layers * group / chunk)
    return recomputed * stream + (layers - recomputed) * whole + angles + handed


def _stream_bytes(config: Config) -> int:
    """Return the bytes of the residual stream between two layers."""
    return tokens_of(config) * config.model.hidden_size * (2 if config.training.bf16 else 4) // share(config)


def _layer_backward(config: Config, of_kinds: tuple[Shapes, ...]) -> int:
    """Return what the backward pass of one layer takes at its fullest, in its MLP or in attention.

    Full recomputation adds the layers of a group: what enters the first is kept anyway, but what leaves the last is
    not. A module that is computed again adds what it keeps and what leaves it; a norm its output twice, as Megatron
    computes it anew and copies it to where it was. When the gradient comes to attention, the MLP and the norm before
    it have been freed of it.
    """
    parallel, stream, again = config.parallel, _stream_bytes(config), recomputed_modules(config)
    recomputed = 0
    if parallel.recompute_granularity == "full":
        group = parallel.recompute_num_layers if parallel.recompute_method == "uniform" else 1
        recomputed = group * max(layer_bytes(config, shapes) for shapes in of_kinds)
    mlp = _mlp_backward(config)
    if "mlp" in again:
        mlp += _mlp_bytes(config) + stream
    if "layernorm" in again:
        mlp += 2 * stream
    freed = 2 * stream + (0 if "mlp" in again else _mlp_bytes(config))
    gathered = stream * share(config) if share(config) > 1 else 0
    attention = gathered + max(attention_backward(config, shapes) for shapes in of_kinds)
    return recomputed + stream + max(mlp, attention - freed)


def _mlp_backward(config: Config) -> int:
    """Return the bytes of the gradients inside the MLP at their fullest.

    Experts take more as they compute than their gradients do: there is no gradient of the stream then, or, where they
    are computed again, what enters them is kept already. With two factors either those of the product and of both (one
    of the block's tensors is free by then); or, under sequence parallelism, the gathered gradient of the block's output
    and that of the product. The buffer that gathers the input of a matrix stays.
    """
    if config.model.num_experts is not None:
        return _experts_at_work(config) - _stream_bytes(config)
    inner = _inner_bytes(config)
    most = inner if config.model.block == "phi" else 2 * inner
    if share(config) == 1:
        return most
    gathered = _stream_bytes(config) * share(config)
    return gathered + max(most, gathered + inner)


def loss_head_bytes(config: Config, vocab_size: int) -> int:
    """Return the bytes of the loss head at its fullest, forward or backward, and of the final hidden states.

    A block of fp32 logits, which its gradient overwrites. The weight's gradient is added to where Megatron gathers it;
    what autograd gets in its stead are zeros of the weight's type, after the last block has been freed. Phi's bias is a
    column of a copy of the matrix, whose gradient is gathered in fp32 and rounded while the last block is still there.
    """
    model, tp, tokens = config.model, config.parallel.tensor_model_parallel_size, tokens_of(config)
    e, rows, width = 2 if config.training.bf16 else 4, model.padded_vocab_size(vocab_size) // tp, model.hidden_size
    block = 4 * min(config.training.loss_block_tokens, tokens) * rows
    weight = max(block, e * rows * width)
    if model.block == "phi":
        width += 8  # with the bias, and zeros
        weight = block + (2 * e + 4) * rows * width
    hidden = 2 * e * tokens * width + final_norm_bytes(config)  # with its gradient
    if share(config) > 1:
        hidden += e * tokens * width + _stream_bytes(config)  # the buffer that gathers; what it gathers
    return weight + hidden


def uncounted(config: Config) -> Iterator[str]:
    """Yield a line for each option whose memory these formulas do not know, or know under an assumption."""
    parallel, training = config.parallel, config.training
    if training.fp8_format is not None:
        yield "fp8_format: copies of weights and activations in fp8 are not counted, bf16's are"
    if parallel.tp_comm_overlap:
        yield "tp_comm_overlap: Transformer Engine's buffers are not counted"
    if parallel.cpu_offloading:
        yield "cpu_offloading: what is on its way to or from the host is not counted"
    if parallel.compile:
        yield "compile: counted as if layers were not compiled"
    if config.optimizer.use_precision_aware_optimizer and not config.optimizer.optimizer_cpu_offload:
        yield "use_precision_aware_optimizer: counted by the types of its states, scales of fp8 are not"
    if parallel.attention_backend == "reference" or not training.bf16:
        yield "attention_backend: the reference's scores of all pairs are not counted"
    if config.model.num_experts is not None:
        busiest = f"{program('rehearse')} --expert-load has the busiest rank"
        yield f"num_experts: counted as if all were chosen alike; {busiest}"
    if config.logging.attention_health_interval:
        yield "attention_health_interval: the fp32 keys and scores of the layer being measured are not counted"
