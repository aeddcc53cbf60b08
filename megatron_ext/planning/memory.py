"""Estimate the memory of one GPU from the configuration alone, by the formulas of docs/planning.md.

Legend: t tokens of this rank, D hidden, F inside the MLP, N query heads, G key heads and H head size of one tensor-
parallel rank; tp, pp, cp and dp the tensor-, pipeline-, context- and data-parallel sizes; e the bytes of a number
(bf16: 2); s = tp under sequence parallelism, otherwise 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from megatron_ext.attention.choice import BY_NAME
from megatron_ext.attention.interface import Scheme
from megatron_ext.checkpoint.hf.names import Cut, full_shape, parameters_of
from megatron_ext.config import Config, ModelConfig
from megatron_ext.planning.attention_shapes import Shapes, attention_shapes

HEADROOM = 0.15  # share of a GPU's memory reserved for CUDA's context, NCCL's buffers and fragmentation
_EMBEDDING = "model.embed_tokens.weight"
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Block:
    """Activations that a layer of one architecture keeps for its backward pass.

    Attributes:
        norms: number of norms of a layer.
        norm_input: bytes per number of a norm's saved input; None for e.
        norm_outputs: number of tensors of [t, D] kept as inputs of the attention and the MLP: outputs of norms, or with
            norms after them (olmo3) the residual stream.
        statistics: bytes per token of a norm.
        mlp: number of tensors of [t, F / tp] that the MLP keeps.
        mlp_gradients: number of tensors of [t, F / tp] that its backward pass needs.
    """

    norms: int
    norm_input: int | None
    norm_outputs: int
    statistics: int
    mlp: int
    mlp_gradients: int


BLOCKS = {
    "llama": Block(norms=2, norm_input=None, norm_outputs=2, statistics=4, mlp=3, mlp_gradients=2),
    "phi": Block(norms=1, norm_input=None, norm_outputs=1, statistics=8, mlp=2, mlp_gradients=1),
    "olmo3": Block(norms=2, norm_input=None, norm_outputs=2, statistics=4, mlp=3, mlp_gradients=2),
    "gpt_oss": Block(norms=2, norm_input=None, norm_outputs=2, statistics=4, mlp=8, mlp_gradients=2),
    "gemma3": Block(norms=4, norm_input=4, norm_outputs=2, statistics=4, mlp=5, mlp_gradients=2),
}


@dataclass(frozen=True)
class Memory:
    """The bytes on one GPU of a pipeline stage, by part.

    Attributes:
        weights: the parameters in the compute dtype.
        gradients: fp32 unless the precision-aware optimizer uses another dtype.
        optimizer: Adam's moments, and in bf16 runs the master weights; without the offloaded part.
        batches: tokens, labels and similar tensors of a step's micro-batches.
        activations: tensors kept by the layers for the backward pass, for all micro-batches in flight.
        logits: peak of the output layer and loss, on the last stage.
        layer: peak of one layer's backward pass: gradients, and under full recomputation the layer itself.
        host: pinned host memory for the inputs of layers; not part of the GPU's total.
    """

    weights: int
    gradients: int
    optimizer: int
    batches: int
    activations: int
    logits: int
    layer: int
    host: int

    @property
    def static(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak, either in the loss or in a layer, without `HEADROOM`."""
        return self.static + self.batches + self.activations + max(self.logits, self.layer)


def estimate(config: Config, world_size: int, vocab_size: int) -> Memory:
    """Return the memory of the fullest pipeline stage under the smallest or the widest window."""
    schedule, stages = config.window_schedule(), range(config.parallel.pipeline_model_parallel_size)
    cases = product(stages, {schedule.start, schedule.end})
    memories = (stage_memory(config, world_size, vocab_size, stage, window) for stage, window in cases)
    return max(memories, key=lambda memory: memory.total)


def stage_memory(config: Config, world_size: int, vocab_size: int, stage: int, window: int | None = None) -> Memory:
    """Return the memory of the fullest GPU of a pipeline stage under a window; None for the widest window."""
    ranks = attention_shapes(config, config.window_schedule().end if window is None else window)
    memories = (_memory(config, world_size, vocab_size, stage, shapes) for shapes in dict.fromkeys(ranks))
    return max(memories, key=lambda memory: memory.total)


def _memory(config: Config, world_size: int, vocab_size: int, stage: int, shapes: tuple[Shapes, ...]) -> Memory:
    """Return the memory of a rank, given the attention shapes of layers under the window and of local layers."""
    parallel, sizes = config.parallel, _Sizes(config)
    parameters = stage_parameters(config, vocab_size, stage)
    shares = 1
    if config.gradient_sharing(parallel.device != "cpu", world_size).use_distributed_optimizer:
        shares = config.data_parallel_size(world_size) * parallel.context_parallel_size
    local = sum(map(config.mask_options().is_local, range(1, config.model.num_layers + 1))) / config.model.num_layers
    share = _expert_layers(config, stage) / len(_layers(config, stage))
    layer = sum(
        weight * part * layer_bytes(config, kind, experts=experts)
        for weight, kind in zip((1 - local, local), shapes, strict=False)
        for part, experts in ((share, True), (1 - share, False))
        if part
    )
    last = stage == parallel.pipeline_model_parallel_size - 1
    options = config.optimizer
    state = _BYTES[options.exp_avg_dtype] + _BYTES[options.exp_avg_sq_dtype]
    state += _BYTES[options.main_params_dtype] if config.training.bf16 else 0
    kept = 1 - options.optimizer_offload_fraction if options.optimizer_cpu_offload else 1
    # experts are sharded over fewer ranks than the other parameters
    experts = _expert_parameters(config, stage)
    copies = max(shares // parallel.expert_model_parallel_size, 1)
    with_state = (parameters - experts) / shares + experts / copies
    return Memory(
        weights=sizes.e * parameters,
        gradients=_BYTES[options.main_grads_dtype] * parameters,
        optimizer=math.ceil(state * kept * with_state),
        batches=_batches(config, world_size, sizes),
        activations=_activations(config, world_size, stage, math.ceil(layer), sizes),
        logits=loss_head_bytes(config, vocab_size) if last else 0,
        layer=max(
            _layer_backward(config, shapes, sizes, experts=experts)
            for experts, part in ((True, share), (False, 1 - share))
            if part
        ),
        host=_layer_inputs(config, world_size, stage)[1] * sizes.stream,
    )


def stage_parameters(config: Config, vocab_size: int, stage: int) -> int:
    """Count the parameters of one tensor- and expert-parallel rank of a stage, with the padded vocabulary."""
    model, parallel = config.model, config.parallel
    last, tp = parallel.pipeline_model_parallel_size - 1, parallel.tensor_model_parallel_size
    counts = _counts(model, vocab_size, tp, parallel.expert_model_parallel_size, _layers(config, stage))
    total = sum(size for name, size in counts.items() if "{i}" in name)
    tied = not model.untie_embeddings_and_output_weights
    if stage == 0 or (tied and stage == last):  # a tied output matrix is a copy on the last stage
        total += counts[_EMBEDDING]
    if stage == last:
        total += sum(size for name, size in counts.items() if "{i}" not in name and name != _EMBEDDING)
    return total


def _layers(config: Config, stage: int) -> tuple[int, ...]:
    """Return the layers of a pipeline stage, counted from 0."""
    model, parallel = config.model, config.parallel
    stages = parallel.pipeline_model_parallel_size
    chunk = parallel.num_layers_per_virtual_pipeline_stage or model.num_layers // stages
    return tuple(layer for layer in range(model.num_layers) if layer // chunk % stages == stage)


def _expert_layers(config: Config, stage: int) -> int:
    """Return the number of layers with experts of a pipeline stage."""
    return sum(map(config.model.has_experts, _layers(config, stage)))


def _expert_parameters(config: Config, stage: int) -> int:
    """Count the parameters of the experts of one rank of a pipeline stage; 0 without experts."""
    model, parallel = config.model, config.parallel
    here = _expert_layers(config, stage) * (model.num_experts or 0) // parallel.expert_model_parallel_size
    return here * 3 * model.hidden_size * model.expert_width // parallel.tensor_model_parallel_size


@cache
def _counts(
    model: ModelConfig, vocab_size: int, tensor_size: int, expert_size: int, layers: tuple[int, ...]
) -> Mapping[str, int]:
    """Count one rank's elements of each parameter of the name table; `{i}` stands for all of these layers together."""
    counts: dict[str, int] = {}
    for parameter in filter(lambda row: row.trained, parameters_of(model)):
        ranks = 1 if parameter.cut is Cut.WHOLE else tensor_size
        copies = (model.num_experts or 0) // expert_size if parameter.of_experts else 1
        if parameter.stacked:
            copies *= sum(parameter.in_layer(model, layer) for layer in layers)
        for name in parameter.hugging_face:
            shape = full_shape(name, model, vocab_size)
            if parameter.cut is Cut.VOCABULARY:
                shape = (model.padded_vocab_size(vocab_size), *shape[1:])
            counts[name] = counts.get(name, 0) + copies * math.prod(shape) // ranks
    return counts


class _Sizes:
    """Sizes named in the legend, and values derived from them.

    Attributes:
        rotated: the fraction of layers with RoPE.
        again: the recomputed modules of a layer, in addition to full recomputation.
        stream: bytes of the residual stream between two layers, e t D / s.
        whole: the same gathered over tensor-parallel ranks, e t D.
        inner: bytes of [t, F / tp].
    """

    def __init__(self, config: Config) -> None:
        model, parallel = config.model, config.parallel
        self.tp = parallel.tensor_model_parallel_size
        self.t = config.data.micro_batch_size * config.data.seq_length // parallel.context_parallel_size
        self.e, self.s = 2 if config.training.bf16 else 4, self.tp if parallel.sequence_parallel else 1
        self.heads, self.key_heads = model.num_attention_heads // self.tp, max(model.num_query_groups // self.tp, 1)
        self.head_size = model.head_size
        self.rotated = sum(map(model.has_rope, range(1, model.num_layers + 1))) / model.num_layers
        self.again = parallel.recomputed_modules
        self.stream = self.t * model.hidden_size * self.e // self.s
        self.whole = self.stream * self.s
        self.inner = self.e * self.t * model.ffn_hidden_size // self.tp
        self.block = BLOCKS[model.block]

    @property
    def copied_queries(self) -> int:
        """Return the number of query heads copied out of the projection's output.

        No copy is needed if the queries of one key head are contiguous, or each query head has a key head.
        """
        return 0 if self.key_heads in (1, self.heads) else self.heads


def _batches(config: Config, world_size: int, sizes: _Sizes) -> int:
    """Return the bytes of a step's micro-batches, which are all moved to the device at its start."""
    per_token = 8 + 8 + 4 + 4 + 1  # token, label, position, weight, trained
    scored = 8 + 8 + 4 + 1 + 1 if config.weighting.token_weighting in ("frozen", "unfrozen") else 0  # on every rank
    whole = config.data.micro_batch_size * config.data.seq_length
    return config.microbatches(world_size) * (per_token * sizes.t + scored * whole)


def layer_bytes(config: Config, shapes: Shapes, *, experts: bool) -> int:
    """Return the bytes that one layer keeps for the backward pass of a micro-batch, without full recomputation."""
    sizes = _Sizes(config)
    mlp = 0 if "mlp" in sizes.again else _mlp_bytes(config, sizes, experts)
    return _norm_bytes(config, sizes) + mlp + attention_bytes(config, shapes)


def _norm_bytes(config: Config, sizes: _Sizes) -> int:
    """Return the bytes kept by a layer's norms: input, output, statistics; if recomputed, the first two inputs."""
    block, hidden, e = sizes.block, config.model.hidden_size, sizes.e
    entering = (block.norm_input or e) * hidden + block.statistics
    if "layernorm" in sizes.again and config.model.block != "phi":
        per_token = (block.norms - 2) * entering + 2 * e * hidden
    else:
        per_token = block.norms * entering + block.norm_outputs * e * hidden
    return math.ceil(sizes.t * per_token / sizes.s)


def _mlp_bytes(config: Config, sizes: _Sizes, experts: bool) -> int:
    """Return the bytes kept by the MLP in [t, F / tp], or by the router, experts and shared experts."""
    kept = sizes.block.mlp
    if not experts:
        return kept * sizes.inner
    shared = kept * sizes.e * (config.model.moe_shared_expert_intermediate_size or 0) / sizes.tp
    return math.ceil(sizes.t * (_expert_bytes(config, sizes) + shared))


def _expert_bytes(config: Config, sizes: _Sizes) -> float:
    """Return the bytes per token of a layer's router and experts, with balanced experts.

    Of E logits: the weights of a token's experts, whole and transposed, the softmax that balances and its counts, 4
    bytes each, and two maps, (16 + 2) E / s, and sigmoid scores, 4 E / s; of each choice its number twice and its
    weight, 20 k / s. Of k copies of a token: the experts' input, e D, their weights, 4, and inside `mlp` e F / tp.
    """
    model = config.model
    per_expert = 22 if model.moe_router_score_function == "sigmoid" else 18
    routing = (per_expert * (model.num_experts or 0) + 20 * model.moe_router_topk) / sizes.s
    inner = sizes.block.mlp * sizes.e * model.expert_width / sizes.tp
    return routing + model.moe_router_topk * (sizes.e * model.hidden_size + 4 + inner)


def attention_bytes(config: Config, shapes: Shapes) -> int:
    """Return the bytes that one layer's attention keeps between its two projections for the backward pass.

    Per head: N + 2 G of queries, keys and values as projected, N + G rotated, N of output; in addition 4 N of softmax
    statistics, and 4 e of cosines and sines per rotated dimension. A layer without RoPE has `copied_queries`, no
    rotated keys, and no cosines and sines. Recomputed attention keeps no statistics, and nothing of the exchange.
    Norms of queries and keys keep their inputs.
    """
    sizes = _Sizes(config)
    if config.model.multi_latent_attention:
        return _latent_bytes(config, shapes, sizes)
    heads, key_heads = sizes.heads, sizes.key_heads
    again = "core_attn" in sizes.again
    if shapes.scheme is Scheme.EXCHANGE and not again:
        rows = _exchanged(config, shapes, sizes)
    else:
        fresh = 1 if config.model.has_qk_norms else sizes.rotated  # fraction of layers with new queries and keys
        apart = fresh * (heads + key_heads) + (1 - fresh) * sizes.copied_queries
        rows = shapes.tokens * (heads + 2 * key_heads + apart + heads)
    per_token = (0 if again else 4 * heads) + sizes.rotated * 4 * sizes.e * config.model.rotary_size
    if config.model.has_qk_norms:
        both = heads + key_heads
        entered = 4 * both if config.model.block == "gemma3" else sizes.e * sizes.copied_queries
        per_token += entered * sizes.head_size + 4 * (2 if config.model.block == "olmo3" else both)
    return math.ceil(sizes.e * sizes.head_size * rows + shapes.tokens * per_token)


def _latent_bytes(config: Config, shapes: Shapes, sizes: _Sizes) -> int:
    """Return what `attention_bytes` does for latent attention.

    With N heads of this rank, the latent of Z and the A rotated dimensions of the key: the projected row twice, as a
    norm's input and as that of the up-projection, Z + A each; the queries, N H; of each row that is expanded, the key,
    N H, and the projection's output with the value, N (H - A + W); the output, N W. With an exchange, rows are expanded
    for local and for remote pieces, or keys and values are exchanged. A kernel whose values must have the keys' size
    gets copies of N H, and its output has N H, too.
    """
    model, t, heads = config.model, shapes.tokens, sizes.heads
    again = "core_attn" in sizes.again
    narrow = all(BY_NAME[call.backend].narrow_values for call in shapes.calls)
    key, out = heads * model.head_size, heads * model.v_head_dim
    value = heads * (model.qk_head_dim + model.v_head_dim) if narrow else key
    row = model.kv_lora_rank + model.qk_pos_emb_head_dim
    exchanges_latent = row < key + out
    kept = t * (row / sizes.s + row + 2 * (model.q_lora_rank or 0) / sizes.s + key)
    if again:
        kept += t * (model.qk_pos_emb_head_dim if exchanges_latent else key + value)
    elif shapes.scheme is Scheme.EXCHANGE:
        if shapes.local is not None:
            kept += shapes.local.keys * (key + value) if exchanges_latent else t * key + shapes.local.keys * value
        if shapes.remote is not None:
            kept += shapes.remote.keys * (row + key + value if exchanges_latent else key + out + (0 if narrow else key))
        kept += t * out if shapes.local is not None and shapes.remote is not None else 0
    else:
        kept += t * (key + value)
    kept += t * (out if narrow or again else out + key)
    norms = 4 * (2 if model.q_lora_rank else 1) / sizes.s
    per_token = norms + (0 if again else 4 * heads) + 4 * sizes.e * model.rotary_size
    return math.ceil(sizes.e * kept + t * per_token)


def _exchanged(config: Config, shapes: Shapes, sizes: _Sizes) -> float:
    """Return the rows, times heads, that the exchange keeps.

    These are the rotated queries; with local pieces the rotated keys and the projection's output, which includes the
    values; the keys and values of remote pieces; and the output twice, as computed and merged.
    """
    heads, key_heads, tokens = sizes.heads, sizes.key_heads, shapes.tokens
    rows: float = tokens * heads
    if shapes.local is not None:
        rows += tokens * (heads + 2 * key_heads + sizes.rotated * key_heads)
    if shapes.remote is not None:
        rows += 2 * key_heads * shapes.remote.keys
    parts = math.gcd(config.parallel.overlap_parts(on_cuda=config.parallel.device != "cpu"), key_heads)
    joined = shapes.remote is not None and (shapes.local is not None or parts > 1)
    return rows + tokens * heads * (2 if joined else 1)


def _activations(config: Config, world_size: int, stage: int, layer: int, sizes: _Sizes) -> int:
    """Return the bytes that the layers of a pipeline stage keep for all micro-batches in flight.

    Full recomputation keeps the input of each group of layers. The output of a stage is kept until its gradient
    arrives; an interleaved pipeline prefetches the next input and the next gradient.
    """
    model, parallel = config.model, config.parallel
    pp = parallel.pipeline_model_parallel_size
    flights, chunk, chunks = _in_flight(config, world_size, stage)
    outputs = 0 if stage == pp - 1 and chunks == 1 else flights * sizes.stream
    if chunks > 1:
        outputs += 2 * sizes.stream
    layers = flights * chunk
    if parallel.recompute_granularity != "full":
        return layers * layer + outputs
    group = parallel.recompute_num_layers
    angles = 4 * model.rotary_size * sizes.t  # fp32, the same for all layers with the same base
    if model.rotary_base_local is not None:
        angles *= 2
    if parallel.recompute_method == "uniform":
        return _layer_inputs(config, world_size, stage)[0] * sizes.stream + angles + outputs
    recomputed = math.ceil(layers * group / chunk)
    return recomputed * sizes.stream + (layers - recomputed) * layer + angles + outputs


def _in_flight(config: Config, world_size: int, stage: int) -> tuple[int, int, int]:
    """Return the model chunks in flight at a stage, the layers of a chunk, and the chunks of the stage."""
    pp = config.parallel.pipeline_model_parallel_size
    chunk = config.parallel.num_layers_per_virtual_pipeline_stage or config.model.num_layers // pp
    chunks = config.model.num_layers // pp // chunk
    # 1F1B keeps pp - stage micro-batches before its first backward pass; interleaved chunks have a longer warm-up
    flights = pp - stage if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    return min(flights, config.microbatches(world_size) * chunks), chunk, chunks


def _layer_inputs(config: Config, world_size: int, stage: int) -> tuple[int, int]:
    """Return how many inputs of recomputed layers a stage keeps on the device and on the host.

    Of each chunk in flight, its last input stays on the device, and one that another stage has sent.
    """
    parallel = config.parallel
    flights, chunk, chunks = _in_flight(config, world_size, stage)
    groups = chunk // parallel.recompute_num_layers
    if not parallel.offload_layer_inputs or groups == 1:
        return flights * groups, 0
    # an interleaved pipeline runs each chunk with pp micro-batches in turn
    turns = (number // parallel.pipeline_model_parallel_size % chunks for number in range(flights))
    sent = sum(stage > 0 or turn > 0 for turn in turns)
    return flights + sent, flights * (groups - 1) - sent


def _layer_backward(config: Config, of_kinds: tuple[Shapes, ...], sizes: _Sizes, *, experts: bool) -> int:
    """Return the peak bytes of one layer's backward pass, in its MLP or in attention.

    Full recomputation adds the layers of a group. A recomputed module adds its kept tensors and its output; a norm adds
    its output twice, because Megatron recomputes it and copies it back. Attention runs after the MLP and the norm
    before it have been freed.
    """
    parallel = config.parallel
    recomputed = 0
    if parallel.recompute_granularity == "full":
        group = parallel.recompute_num_layers if parallel.recompute_method == "uniform" else 1
        recomputed = group * max(layer_bytes(config, shapes, experts=experts) for shapes in of_kinds)
    mlp, freed = _mlp_backward(config, sizes, experts), 2 * sizes.stream
    if parallel.mlp_block_tokens is not None:
        # of a block: the MLP; and the gradients of the input, and of the weights: the sum and those of the block
        block = min(parallel.mlp_block_tokens / sizes.t, 1)
        mlp = math.ceil(block * (mlp + _mlp_bytes(config, sizes, experts) + sizes.stream)) + sizes.stream
        mlp += math.ceil((1 - block) * sizes.whole) if sizes.s > 1 else 0  # attention's gather buffer stays
        matrices = 2 if config.model.block == "phi" else 3
        mlp += (4 + sizes.e) * matrices * config.model.hidden_size * config.model.ffn_hidden_size // sizes.tp
    elif "mlp" in sizes.again:
        mlp += _mlp_bytes(config, sizes, experts) + sizes.stream
    else:
        freed += _mlp_bytes(config, sizes, experts)
    if "layernorm" in sizes.again:
        mlp += 2 * sizes.stream
    gathered = sizes.whole if sizes.s > 1 else 0
    attention = gathered + max(_attention_backward(config, shapes, sizes) for shapes in of_kinds)
    returning = sizes.stream if parallel.offload_layer_inputs else 0  # the input of the layer before
    return recomputed + returning + sizes.stream + max(mlp, attention - freed)


def _mlp_backward(config: Config, sizes: _Sizes, experts: bool) -> int:
    """Return the peak bytes of the gradients inside the MLP.

    Experts need more in their forward pass: copies of k tokens as they are sent, under expert parallelism as they
    arrive, and their output twice; tensor-parallel ranks sum the output in the router's fp32; and the shared experts'
    output. Otherwise either the gradients inside, or under sequence parallelism the gathered gradient of the output and
    that of the product; the buffer that gathers a matrix's input stays.
    """
    model, parallel = config.model, config.parallel
    if experts:
        sent = sizes.stream * model.moe_router_topk
        left = sent * sizes.s
        taken = sent if parallel.expert_model_parallel_size == 1 else 2 * sent
        taken += left if model.num_experts == parallel.expert_model_parallel_size else 2 * left
        if sizes.tp > 1:
            taken += (left + sent) * 4 // sizes.e + sizes.whole
        return taken - (0 if model.moe_shared_expert_intermediate_size else sizes.stream)
    most = sizes.block.mlp_gradients * sizes.inner
    return most if sizes.s == 1 else sizes.whole + max(most, sizes.whole + sizes.inner)


def _attention_backward(config: Config, shapes: Shapes, sizes: _Sizes) -> int:
    """Return the bytes of the gradients of attention's output, queries, keys and values, and of scratch memory.

    Recomputed attention adds its output and statistics.
    """
    taken = sizes.e * shapes.tokens * (sizes.heads + sizes.key_heads) * config.model.key_value_size
    if "core_attn" in sizes.again:
        taken += shapes.tokens * sizes.heads * (sizes.e * sizes.head_size + 4)
    shares = config.parallel.context_parallel_size if shapes.scheme is Scheme.ULYSSES else 1
    heads, key_heads = sizes.heads // shares, max(sizes.key_heads // shares, 1)
    scratch = [
        packed_backward_scratch(call.queries, heads)
        if call.backend == "triton_packed"  # others count as FlashAttention 2
        else flash_backward_scratch(call.queries, call.keys, call.segments, heads, key_heads, sizes.head_size, sizes.e)
        for call in shapes.calls
    ]
    return taken + max(scratch)


def packed_backward_scratch(tokens: int, heads: int) -> int:
    """Return the scratch bytes of our packed kernels in the backward pass: a float for each query and head."""
    return 4 * tokens * heads


def flash_backward_scratch(
    tokens: int, keys: int, segments: int, heads: int, key_heads: int, head_size: int, width: int
) -> int:
    """Return the scratch bytes of FlashAttention 2 in its backward pass, in addition to its results.

    fp32 [tokens + 128 segments, heads, head size rounded up to 32] for the unrounded query gradients, as many row sums
    for each head, and with grouped keys the gradients of keys and values for each head.

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
    """Return the peak bytes of the output layer and loss, and of the final hidden states.

    A block of fp32 logits is overwritten by its gradient. The weight's gradient is added to Megatron's buffer. Phi's
    bias is a column of a copy of the matrix, whose gradient is accumulated in fp32 and rounded while the last block
    still exists.
    """
    model, sizes = config.model, _Sizes(config)
    e, rows, width = sizes.e, model.padded_vocab_size(vocab_size) // sizes.tp, model.hidden_size
    block = 4 * min(config.training.loss_block_tokens, sizes.t) * rows
    weight = block
    if model.block == "phi":
        width += 8  # including the bias, and zeros
        weight = block + (2 * e + 4) * rows * width
    norm = (sizes.block.norm_input or e) * model.hidden_size + sizes.block.statistics  # its input and statistics
    hidden = 2 * e * sizes.t * width + math.ceil(sizes.t * norm / sizes.s)  # including its gradient
    if sizes.s > 1:
        hidden += e * sizes.t * width + sizes.stream  # the gather buffer, and its input
    return weight + hidden


def uncounted(config: Config) -> Iterator[str]:
    """Yield a line for each option whose memory the formulas do not model, or model under an assumption."""
    parallel, training = config.parallel, config.training
    if training.fp8_format is not None:
        yield "fp8_format: copies of weights and activations in fp8 are not counted, bf16's are"
    if parallel.tp_comm_overlap:
        yield "tp_comm_overlap: Transformer Engine's buffers are not counted"
    if parallel.compile:
        yield "compile: counted as if layers were not compiled"
    if config.optimizer.use_precision_aware_optimizer and not config.optimizer.optimizer_cpu_offload:
        yield "use_precision_aware_optimizer: counted by the types of its states, scales of fp8 are not"
    if parallel.attention_backend == "reference" or not training.bf16:
        yield "attention_backend: the reference's scores of all pairs are not counted"
    if config.model.num_experts is not None:
        yield "num_experts: counted as if all were chosen alike"
    if config.logging.attention_health_interval:
        yield "attention_health_interval: the fp32 keys and scores of the layer being measured are not counted"
