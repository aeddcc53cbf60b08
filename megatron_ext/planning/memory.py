"""Estimates the memory of one GPU from the configuration alone, by the formulas of docs/planning.md.

Legend: t tokens of this rank, D hidden, F inside the SwiGLU block, N query heads, G key heads, H head size; tp, pp, cp
and dp the tensor-, pipeline-, context- and data-parallel sizes; e the bytes of a number (bf16: 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.checkpoint.hf.names import Cut, full_shape, parameters_of
from megatron_ext.config import Config, ModelConfig

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Memory:
    """Holds the bytes on one GPU of a pipeline stage, part by part.

    Attributes:
        weights: the parameters as they compute.
        gradients: always fp32.
        optimizer: Adam's moments, and in bf16 runs the fp32 master weights.
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
    """Return the memory of the fullest pipeline stage, under the first window or the last, whichever takes more."""
    stage, schedule = fullest_stage(config, world_size, vocab_size), config.window_schedule()
    windows = (schedule.window_at(0), schedule.end)
    memories = [stage_memory(config, world_size, vocab_size, stage, window) for window in windows]
    return max(memories, key=lambda memory: memory.total)


def fullest_stage(config: Config, world_size: int, vocab_size: int) -> int:
    """Return the pipeline stage that needs most, counted from 0."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(stages, key=lambda stage: stage_memory(config, world_size, vocab_size, stage).total)


def stage_memory(config: Config, world_size: int, vocab_size: int, stage: int, window: int | None = None) -> Memory:
    """Return the memory of one GPU of a pipeline stage, counted from 0, under a window; None for the last one."""
    parallel, wide = config.parallel, 2 if config.training.bf16 else 4
    parameters = stage_parameters(config, vocab_size, stage)
    shares = 1
    if config.gradient_sharing(parallel.device != "cpu", world_size).use_distributed_optimizer:
        shares = config.data_parallel_size(world_size) * parallel.context_parallel_size
    state = 12 if config.training.bf16 else 8  # two fp32 moments, and in bf16 runs the fp32 master weight
    last = stage == parallel.pipeline_model_parallel_size - 1
    return Memory(
        weights=wide * parameters,
        gradients=4 * parameters,
        optimizer=math.ceil(state * _parameters_with_state(config, vocab_size, stage, shares)),
        batches=_batches(config, world_size),
        activations=_activations(config, world_size, stage),
        logits=loss_head_bytes(config, vocab_size) if last else 0,
        layer=_layer_backward(config, config.window_schedule().end if window is None else window),
    )


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


def _sizes(model: ModelConfig, vocab_size: int, tensor_size: int, expert_size: int) -> dict[str, int]:
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


def _tokens(config: Config) -> int:
    """Return t."""
    return config.data.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size


def _share(config: Config) -> int:
    """Return s: over how many ranks what lies between matrices is shared out."""
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


def _batches(config: Config, world_size: int) -> int:
    """Return the bytes of a step's micro-batches, which are all moved to the device at its start."""
    whole = config.data.micro_batch_size * config.data.seq_length
    per_token = 8 + 8 + 4 + 4 + 1  # token, label, position, weight, trained
    scored = 8 + 8 + 4 + 1 + 1 if config.weighting.token_weighting in ("frozen", "unfrozen") else 0  # on every rank
    return config.microbatches(world_size) * (per_token * _tokens(config) + scored * whole)


def attention_bytes(config: Config, tokens: int) -> int:
    """Return the bytes that one layer's attention keeps between its two projections.

    Per token e (N + 2 G) H / tp of queries, keys and values as computed together, e (N + G) H / tp turned, e N H / tp
    of output, 4 N / tp of normalisers, and 4 e H of cosines and sines. A layer without RoPE copies its queries, but
    keeps no keys turned, no cosines and sines. Under the exchange of context parallelism the
    queries turned, the output twice, and the keys and values that the rank's queries see: of one document in a row
    those are (2 cp + 1) / 2 rows of keys per token, which is the most.
    """
    model, parallel = config.model, config.parallel
    tp, e = parallel.tensor_model_parallel_size, 2 if config.training.bf16 else 4
    heads, groups, size = model.num_attention_heads, model.num_query_groups, model.head_size
    turned = sum(map(model.has_rope, range(1, model.num_layers + 1))) / model.num_layers
    rows = (heads + 2 * groups) + (heads + turned * groups) + heads
    if parallel.context_parallel_size > 1 and parallel.cp_scheme != "ulysses":
        rows = 3 * heads + groups * (2 * parallel.context_parallel_size + 1)
    return math.ceil(tokens * (e * rows * size / tp + 4 * heads / tp + turned * 4 * e * size))


def layer_bytes(config: Config, tokens: int, *, on_cuda: bool = True) -> int:
    """Return the bytes that one layer keeps for the backward pass of `tokens` tokens on one rank without recomputation.

    Per token 2 (2 e D + 4) / s for the norms: what enters and leaves each, and its statistics; `attention_bytes`; and
    3 e F / tp in the SwiGLU block: its two factors as computed together, and the product.

    Args:
        config: the run's.
        tokens: of this rank.
        on_cuda: with its fused operators; on a CPU torch's norms keep two fp32 copies instead of what enters them, and
            the SwiGLU block 5 e F / tp, one activated factor and a copy more.
    """
    e = 2 if config.training.bf16 else 4
    norms = 2 * ((e + (e if on_cuda else 8)) * config.model.hidden_size + 4) / _share(config)
    kept = 3 if on_cuda else 5
    swiglu = kept * e * config.model.ffn_hidden_size / config.parallel.tensor_model_parallel_size
    if config.model.num_experts is not None:
        swiglu = expert_bytes(config, kept)
    return math.ceil(tokens * (norms + swiglu)) + attention_bytes(config, tokens)


def expert_bytes(config: Config, kept: int) -> float:
    """Return the bytes per token that a layer's router and experts keep, were the experts chosen alike.

    The router's fp32 logits, weights and choices, 9 E / s; k copies of the token as it is sent, as it arrives, and
    sorted by expert, e D each, s times shared out before they are gathered over the tensor-parallel ranks; inside the
    experts what a SwiGLU block keeps and the product weighed, (kept + 1) e k F / tp. What a layer really keeps grows
    with its busiest rank's tokens: that is the router's to say.

    Args:
        config: the run's.
        kept: tensors of F numbers that a SwiGLU block keeps.
    """
    model, e, share = config.model, 2 if config.training.bf16 else 4, _share(config)
    sent = e * model.hidden_size * (2 / share + 1)
    inner = (kept + 1) * e * model.expert_width / config.parallel.tensor_model_parallel_size
    return 9 * (model.num_experts or 0) / share + model.moe_router_topk * (sent + inner)


def final_norm_bytes(config: Config, tokens: int, *, on_cuda: bool = True) -> int:
    """Return the bytes that the last norm keeps beside its output: its input, or two fp32 copies, and statistics."""
    e = 2 if config.training.bf16 else 4
    return math.ceil(tokens * ((e if on_cuda else 8) * config.model.hidden_size + 4) / _share(config))


def _activations(config: Config, world_size: int, stage: int) -> int:
    """Return the bytes that the layers of a pipeline stage keep for all micro-batches in flight.

    Full recomputation keeps the residual stream that enters each group of layers.
    """
    model, parallel = config.model, config.parallel
    pp, tokens = parallel.pipeline_model_parallel_size, _tokens(config)
    chunk = parallel.num_layers_per_virtual_pipeline_stage or model.num_layers // pp
    chunks = model.num_layers // pp // chunk
    # 1F1B keeps pp - stage micro-batches before its first backward pass; interleaved chunks warm up longer.
    flights = pp - stage if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    layers = min(flights, config.microbatches(world_size) * chunks) * chunk
    whole = layer_bytes(config, tokens)
    if parallel.recompute_granularity != "full":
        return layers * whole
    entry, group = _stream_bytes(config), parallel.recompute_num_layers
    angles = 4 * config.model.head_size * tokens  # fp32, the same ones for all layers
    if parallel.recompute_method == "uniform":
        return math.ceil(layers / group) * entry + angles
    recomputed = math.ceil(layers * group / chunk)
    return recomputed * entry + (layers - recomputed) * whole + angles


def _stream_bytes(config: Config) -> int:
    """Return the bytes of the residual stream between two layers."""
    return _tokens(config) * config.model.hidden_size * (2 if config.training.bf16 else 4) // _share(config)


def _layer_backward(config: Config, window: int) -> int:
    """Return what the backward pass of one layer takes at its fullest, in its SwiGLU block or in attention.

    Full recomputation adds the layers of a group: what enters the first is kept anyway, but what leaves the last is
    not. When the gradient comes to attention, the SwiGLU block and the norm before it have been freed of it.
    """
    parallel, tokens = config.parallel, _tokens(config)
    recomputed = 0
    if parallel.recompute_granularity == "full":
        group = parallel.recompute_num_layers if parallel.recompute_method == "uniform" else 1
        recomputed = group * layer_bytes(config, tokens)
    freed = _swiglu_bytes(config) + 2 * _stream_bytes(config)
    taken = max(_swiglu_backward(config), _attention_backward(config, window) - freed)
    return recomputed + _stream_bytes(config) + taken


def _swiglu_bytes(config: Config) -> int:
    """Return what the SwiGLU block keeps: its two factors as computed together, and the product."""
    e, tp = 2 if config.training.bf16 else 4, config.parallel.tensor_model_parallel_size
    return 3 * e * _tokens(config) * _inner_width(config.model) // tp


def _inner_width(model: ModelConfig) -> int:
    """Return F of the block that follows attention; with experts, of all of a token's together."""
    return model.ffn_hidden_size if model.num_experts is None else model.moe_router_topk * model.expert_width


def _swiglu_backward(config: Config) -> int:
    """Return the bytes of the gradients inside the SwiGLU block at their fullest.

    Either those of the product and its two factors (one of the block's five tensors is free by then); or, under
    sequence parallelism, the gathered gradient of the block's output and that of the product. The buffer that gathers
    the input of a matrix stays.
    """
    inner = _swiglu_bytes(config) // 3
    if _share(config) == 1:
        return 2 * inner
    gathered = _stream_bytes(config) * _share(config)
    return gathered + max(2 * inner, gathered + inner)


def _attention_backward(config: Config, window: int) -> int:
    """Return the bytes of attention's gradients: of its output, queries, keys and values, and the kernel's scratch."""
    model, parallel, tokens = config.model, config.parallel, _tokens(config)
    e, tp, size = 2 if config.training.bf16 else 4, parallel.tensor_model_parallel_size, model.head_size
    heads, groups = model.num_attention_heads // tp, max(model.num_query_groups // tp, 1)
    segments = -(-config.data.seq_length // window) * config.data.micro_batch_size
    segments = -(-segments // parallel.context_parallel_size)
    gathered = _stream_bytes(config) * _share(config) if _share(config) > 1 else 0
    scratch = flash_backward_scratch(tokens, tokens, segments, heads, groups, size, e)
    return gathered + e * tokens * (2 * heads + 2 * groups) * size + scratch


def flash_backward_scratch(
    tokens: int, keys: int, segments: int, heads: int, key_heads: int, head_size: int, width: int
) -> int:
    """Return the bytes that flash attention 2 takes in its backward pass beside its results.

    fp32 [tokens + 128 segments, heads, head size rounded up to 32] of the queries' gradients before they are rounded,
    as many row sums for each head, and where heads share keys the keys' and values' gradients for each head.

    Args:
        tokens, keys: rows of queries and of keys.
        segments: of the call.
        heads, key_heads, head_size: of this rank.
        width: bytes of a number.
    """
    rows = tokens + 128 * segments
    expanded = 2 * keys * heads * head_size * width if heads != key_heads else 0
    return 4 * rows * heads * (-(-head_size // 32) * 32 + 1) + expanded


def loss_head_bytes(config: Config, vocab_size: int) -> int:
    """Return the bytes of the loss head at its fullest, forward or backward, and of the final hidden states.

    A block of fp32 logits, which its gradient overwrites. The weight's gradient is added to where Megatron gathers it;
    what autograd gets in its stead are zeros of the weight's type, after the last block has been freed.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    e, rows, tokens = 2 if config.training.bf16 else 4, model.padded_vocab_size(vocab_size) // tp, _tokens(config)
    block = min(config.training.loss_block_tokens, tokens)
    hidden = 2 * e * tokens * model.hidden_size + final_norm_bytes(config, tokens)  # with its gradient
    if _share(config) > 1:
        hidden += e * tokens * model.hidden_size + _stream_bytes(config)  # the buffer that gathers; what it gathers
    return max(4 * block * rows, e * rows * model.hidden_size) + hidden
