"""Estimate the memory of one GPU from the configuration alone, by the formulas of docs/planning.md.

Legend: t tokens of this rank, D hidden, F inside the MLP, N query heads, G key heads and H head size of one tensor-
parallel rank; tp, pp, cp and dp the tensor-, pipeline-, context- and data-parallel sizes; e the bytes of a number
(bf16: 2); s = tp under sequence parallelism, otherwise 1.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from megatron_ext.arrays import Int64
from megatron_ext.attention.backends import BACKENDS, suited
from megatron_ext.checkpoint.parameters import Cut, full_shape, parameters_of
from megatron_ext.config import Config, ModelConfig
from megatron_ext.context_parallel import CPPlan
from megatron_ext.context_parallel.choice import CPOptions, planned_cp
from megatron_ext.context_parallel.exchange import Scheme, copies_of_keys
from megatron_ext.loss import adding_bytes
from megatron_ext.masks import MaskOptions

HEADROOM = 0.15  # share of a GPU's memory reserved for CUDA's context, NCCL's buffers and fragmentation
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Memory:
    """The bytes on one GPU of a pipeline stage, by part."""

    weights: int  # in the compute dtype
    gradients: int
    optimizer: int  # moments, and in bf16 runs the master weights; without the offloaded part
    batches: int  # tokens, labels and similar tensors of a step's micro-batches
    activations: int  # kept by the layers for the backward pass, for all micro-batches in flight
    logits: int  # peak of the output layer and loss, on the last stage
    layer: int  # peak of one layer's backward pass: gradients, and under full recomputation the layer itself
    host: int  # pinned host memory for the inputs of layers; not part of the GPU's total

    @property
    def total(self) -> int:
        """Bytes at the peak, either in the loss or in a layer, without `HEADROOM`."""
        return self.static + self.batches + self.activations + max(self.logits, self.layer)

    @property
    def static(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.gradients + self.optimizer


def estimate(config: Config, world_size: int, vocab_size: int) -> Memory:
    """Return the memory of the fullest pipeline stage under the smallest or the widest window."""
    schedule = config.window_schedule()
    stages = range(config.parallel.pipeline_model_parallel_size)
    memories = (
        stage_memory(config, world_size, vocab_size, stage, window)
        for stage in stages
        for window in {schedule.start, schedule.end}
    )
    return max(memories, key=lambda memory: memory.total)


def static_memory(config: Config, world_size: int, vocab_size: int) -> int:
    """Return the bytes of weights, gradients and optimizer on the fullest pipeline stage."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(sum(_Rank(config, world_size, vocab_size, stage, ()).states()) for stage in stages)


def stage_memory(config: Config, world_size: int, vocab_size: int, stage: int, window: int | None = None) -> Memory:
    """Return the memory of the fullest GPU of a pipeline stage under a window; None for the widest window."""
    return max(rank_memories(config, world_size, vocab_size, stage, window), key=lambda memory: memory.total)


def rank_memories(
    config: Config, world_size: int, vocab_size: int, stage: int, window: int | None = None
) -> list[Memory]:
    """Return the memory of each context-parallel rank of a pipeline stage under a window; None for the widest one."""
    if window is None:
        window = config.window_schedule().end
    ranks = attention_shapes(config, window)
    memories = {shapes: _Rank(config, world_size, vocab_size, stage, shapes).memory() for shapes in set(ranks)}
    return [memories[shapes] for shapes in ranks]


@cache
def parameters_of_rank(
    model: ModelConfig, vocab_size: int, tp: int, ep: int, layers: tuple[int, ...], *, first: bool, last: bool
) -> tuple[int, int, int]:
    """Count the parameters of one rank of a pipeline stage with these layers.

    Returns all of them, the parameters of experts among them, and the matrices that Muon updates. The vocabulary is
    padded. A tied output matrix is a copy of the embedding on the last stage.
    """
    total = 0
    of_experts = 0
    of_matrices = 0
    for parameter in filter(lambda row: row.trained, parameters_of(model)):
        copies = 1
        if parameter.of_experts:
            copies = (model.num_experts or 0) // ep
        if parameter.stacked:
            copies *= sum(parameter.in_layer(model, layer) for layer in layers)
        elif parameter.hugging_face == ("model.embed_tokens.weight",):
            copies = int(first or (last and not model.untie_embeddings_and_output_weights))
        else:
            copies = int(last)
        vocabulary = model.padded_vocab_size(vocab_size) if parameter.cut is Cut.VOCABULARY else vocab_size
        shapes = [full_shape(name, model, vocabulary) for name in parameter.hugging_face]
        size = copies * sum(map(math.prod, shapes))
        if parameter.cut is not Cut.WHOLE:
            size //= tp
        total += size
        if parameter.of_experts:
            of_experts += size
        if len(shapes[0]) == 2 and parameter.cut is not Cut.VOCABULARY:
            of_matrices += size
    return total, of_experts, of_matrices


class Call(NamedTuple):
    """The sizes of one call of a kernel."""

    queries: int
    keys: int
    segments: int


class Shapes(NamedTuple):
    """The sizes of one layer's attention on one context-parallel rank, for rows of a single document each."""

    tokens: int  # of this rank
    scheme: Scheme | None  # how keys come from other ranks; None if none do
    local: Call | None  # the queries that see only this rank's keys; all queries without `scheme` and under Ulysses
    remote: Call | None = None  # the other queries

    @property
    def calls(self) -> list[Call]:
        """The calls that exist."""
        return [call for call in (self.local, self.remote) if call is not None]


def attention_shapes(config: Config, window: int) -> tuple[tuple[Shapes, ...], ...]:
    """Return for each context-parallel rank the shapes of layers under the window, and of local layers if any.

    Masks, plan and scheme come from the code that training uses.
    """
    data = config.data
    return _shapes(config.mask_options(), data.seq_length, data.micro_batch_size, window, planned_cp(config))


@lru_cache(maxsize=1024)
def _shapes(
    options: MaskOptions, row_length: int, rows: int, window: int, context: CPOptions | None
) -> tuple[tuple[Shapes, ...], ...]:
    masks = options.at(row_length, [np.array([row_length])] * rows, window)
    if context is None:
        lengths = (mask.layout.lengths for mask in masks.by_kind)
        return (tuple(Shapes(row_length * rows, None, _call(queries, queries)) for queries in lengths),)
    plans = [(plan, context.choose(plan)) for plan in context.plans(masks)]
    return tuple(tuple(_of_rank(plan, scheme, rank) for plan, scheme in plans) for rank in range(context.group.size))


def _of_rank(plan: CPPlan, scheme: Scheme, rank: int) -> Shapes:
    tokens = plan.layout.tokens // plan.cp_size
    if scheme is Scheme.ULYSSES:
        return Shapes(tokens, scheme, _call(plan.layout.lengths, plan.layout.lengths))
    pieces = plan.pieces_of(rank)
    queries = plan.pieces.end[pieces] - plan.pieces.start[pieces]
    keys = plan.pieces.end[pieces] - plan.key_start[pieces]
    if not plan.rows_moved.any():  # every rank holds whole segments
        return Shapes(tokens, None, _call(queries, keys))
    is_local = plan.is_local[pieces]
    local = _call(queries[is_local], keys[is_local])
    remote = _call(queries[~is_local], keys[~is_local])
    return Shapes(tokens, scheme, local, remote)


def _call(queries: Int64, keys: Int64) -> Call | None:
    """Return the call of pieces with these numbers of queries and keys; None if there are none."""
    if not len(keys):
        return None
    return Call(int(queries.sum()), int(keys.sum()), len(keys))


@cache
def _fullest_flights(sizes: tuple[int, ...], pp: int, flights: int, total: int) -> tuple[int, ...]:
    """Return the chunks in flight, by number, when they have most layers, of a step that runs `total` chunks."""
    chunks = len(sizes)
    # an interleaved pipeline runs each chunk with pp micro-batches in turn, backward in the opposite order
    forward = [number // pp % chunks for number in range(total)]
    running = Counter(forward[:flights])
    moments = [running.copy()]
    for number in range(min(pp * chunks, total - flights)):
        running[chunks - 1 - forward[number]] -= 1
        running[forward[flights + number]] += 1
        moments.append(running.copy())
    fullest = max(moments, key=lambda moment: sum(sizes[chunk] * times for chunk, times in moment.items()))
    return tuple(fullest.elements())


class _Rank:
    """Formulas for one GPU of a pipeline stage, in bytes; `shapes` is one rank's entry of `attention_shapes`."""

    def __init__(
        self, config: Config, world_size: int, vocab_size: int, stage: int, shapes: tuple[Shapes, ...]
    ) -> None:
        self.model = model = config.model
        self.parallel = parallel = config.parallel
        self.config = config
        self.stage = stage
        self.shapes = shapes
        self.vocab_size = vocab_size
        self.block = block = model.traits
        self.read = 2  # tensors of [t, D] that attention and the MLP read
        if block.parallel:
            self.read = 1
        self.norm_count = self.read * block.pre_norm + 2 * block.post_norm  # each keeps its input
        self.tp = tp = parallel.tensor_model_parallel_size
        self.pp = pp = parallel.pipeline_model_parallel_size
        self.microbatches = config.microbatches(world_size)
        self.replicas = config.data_parallel_size(world_size)
        self.sharded = config.gradient_sharing(parallel.device != "cpu", world_size).use_distributed_optimizer
        self.last = stage == pp - 1

        chunks = parallel.layers_of_chunks(model.num_layers)
        self.chunks = chunks[stage::pp]  # the layers of each model chunk of the stage
        starts = list(accumulate(chunks, initial=0))[stage::pp]
        self.layers = tuple(
            layer for start, size in zip(starts, self.chunks, strict=False) for layer in range(start, start + size)
        )
        self.again = parallel.recomputed_modules  # in addition to full recomputation
        self.rotated = sum(map(model.has_rope, range(1, model.num_layers + 1))) / model.num_layers  # share of layers

        self.t = config.data.micro_batch_size * config.data.seq_length // parallel.context_parallel_size
        self.e = 2 if config.training.bf16 else 4
        self.s = tp if parallel.sequence_parallel else 1
        self.heads = model.num_attention_heads // tp
        self.key_heads = max(model.num_query_groups // tp, 1)
        self.whole = self.e * self.t * model.hidden_size  # [t, D]
        self.stream = self.whole / self.s  # the residual stream between two layers
        self.inner = self.e * self.t * model.ffn_hidden_size / tp  # [t, F / tp]

    def memory(self) -> Memory:
        weights, gradients, optimizer = self.states()
        has_experts = set(map(self.model.has_experts, self.layers))
        return Memory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            batches=self.batches(),
            activations=math.ceil(self.activations()),
            logits=math.ceil(self.loss_head()) if self.last else 0,
            layer=math.ceil(max(map(self.layer_backward, has_experts), default=0)),
            host=math.ceil(self.layer_inputs()[1] * self.stream),
        )

    def states(self) -> tuple[int, int, int]:
        """The bytes of weights, gradients and optimizer."""
        parallel = self.parallel
        options = self.config.optimizer
        parameters, of_experts, of_matrices = parameters_of_rank(
            self.model, self.vocab_size, self.tp, parallel.expert_model_parallel_size, self.layers,
            first=self.stage == 0, last=self.last,
        )  # fmt: skip
        shares = 1
        if self.sharded:
            shares = self.replicas * parallel.context_parallel_size
        # experts are sharded over fewer ranks than the other parameters
        copies = max(shares // parallel.expert_model_parallel_size, 1)
        state = _BYTES[options.exp_avg_dtype] + _BYTES[options.exp_avg_sq_dtype]
        if self.config.training.bf16:
            state += _BYTES[options.main_params_dtype]
        kept: float = 1
        if options.optimizer_cpu_offload:
            kept -= options.optimizer_offload_fraction
        optimizer = math.ceil(state * kept * ((parameters - of_experts) / shares + of_experts / copies))
        if options.optimizer == "muon":  # keeps a momentum instead of two moments
            optimizer -= _BYTES["fp32"] * of_matrices
        return self.e * parameters, _BYTES[options.main_grads_dtype] * parameters, optimizer

    def batches(self) -> int:
        """The step's micro-batches, which are all moved to the device at its start."""
        per_token = 8 + 8 + 4 + 4 + 1  # token, label, position, weight, trained
        size = per_token * self.t
        if self.config.weighting.by_losses:  # of whole rows, on every rank
            size += (8 + 8 + 4 + 1 + 1) * self.config.data.micro_batch_size * self.config.data.seq_length
        return self.microbatches * size

    # --- what one layer keeps for the backward pass of a micro-batch, without full recomputation

    def layer(self, shapes: Shapes, experts: bool) -> float:
        kept = self.norms()
        if "mlp" not in self.again:
            kept += self.mlp(experts)
        return kept + self.attention(shapes)

    def norms(self) -> float:
        """Inputs, outputs and statistics; if norms are recomputed, only the inputs of the first two norms.

        Without norms before attention and MLP, their inputs are the residual stream.
        """
        kept = self.norm_count
        if "layernorm" in self.again:
            kept -= 2
        return self.t * (kept * self.norm_input + self.read * self.e * self.model.hidden_size) / self.s

    @property
    def norm_input(self) -> int:
        """A norm's input and statistics, per token."""
        statistics = 8 if self.block.norm == "LayerNorm" else 4
        width = 4 if self.block.zero_centred_norm else self.e
        return width * self.model.hidden_size + statistics

    def mlp(self, experts: bool) -> float:
        """The MLP in [t, F / tp], or router, balanced experts and shared experts.

        Bytes that a token adds:

            (16 + 2) E / s    E fp32 weights of experts, whole and transposed, the softmax that balances and its counts,
                              and two maps
            4 E / s           sigmoid scores, if they choose the experts
            20 k / s          the number of each choice, twice, and its weight
            e D + 4           each of the k copies: the experts' input and its weight
            `mlp` e F / tp    each of the k copies inside its expert
        """
        model = self.model
        kept = self.block.mlp_kept
        if not experts:
            return kept * self.inner
        per_expert = 22 if model.moe_router_score_function == "sigmoid" else 18
        router = (per_expert * (model.num_experts or 0) + 20 * model.moe_router_topk) / self.s
        copy = self.e * model.hidden_size + 4 + kept * self.e * model.expert_width / self.tp
        shared = kept * self.e * (model.moe_shared_expert_intermediate_size or 0) / self.tp
        return self.t * (router + model.moe_router_topk * copy + shared)

    def attention(self, shapes: Shapes) -> float:
        """What attention keeps between its two projections.

        Per head: N + 2 G of queries, keys and values as projected, N + G rotated, N of output; in addition 4 N of
        softmax statistics, and 4 e of cosines and sines per rotated dimension. A layer without RoPE copies queries out
        of the projection's output unless the queries of a key head are contiguous; it has no rotated keys, cosines or
        sines. Recomputed attention keeps no statistics, and nothing of the exchange. Norms of queries and keys keep
        their inputs.
        """
        model = self.model
        heads = self.heads
        key_heads = self.key_heads
        if model.multi_latent_attention:
            return self.latent_attention(shapes)
        again = "core_attn" in self.again
        copied = 0 if key_heads in (1, heads) else heads
        if shapes.scheme is Scheme.EXCHANGE and not again:
            rows = self.exchanged(shapes)
        else:
            fresh = 1 if model.has_qk_norms else self.rotated  # share of layers with new queries and keys
            rotated = fresh * (heads + key_heads)
            rows = shapes.tokens * (heads + 2 * key_heads + rotated + (1 - fresh) * copied + heads)
            # under Ulysses, copies of keys and values replace the projected and the rotated ones
            rows += shapes.tokens * max(2 * self.attended_key_heads(shapes) - (2 + fresh) * key_heads, 0)
        per_token = self.rotated * 2 * self.e * model.rotary_size
        if not again:
            per_token += 4 * heads
        if model.has_qk_norms:
            entered = 4 * (heads + key_heads) if self.block.zero_centred_norm else self.e * copied
            statistics = 2 if self.block.qk_norm == "all_heads" else heads + key_heads
            per_token += entered * model.head_size + 4 * statistics
        return self.e * model.head_size * rows + shapes.tokens * per_token

    def attended_key_heads(self, shapes: Shapes) -> int:
        """Key heads per own token of the keys that this rank attends to, with copies of those that ranks share."""
        if shapes.scheme is not Scheme.ULYSSES:
            return self.key_heads
        return self.key_heads * copies_of_keys(self.key_heads, self.parallel.context_parallel_size)

    def exchanged(self, shapes: Shapes) -> float:
        """Rows, times heads, that the exchange keeps.

        These are the rotated queries; with local pieces the rotated keys and the projection's output, which includes
        the values; the keys and values of remote pieces; and the output twice, as computed and merged.
        """
        heads = self.heads
        key_heads = self.key_heads
        tokens = shapes.tokens
        rows: float = tokens * heads
        if shapes.local is not None:
            rows += tokens * (heads + 2 * key_heads + self.rotated * key_heads)
        if shapes.remote is not None:
            rows += 2 * key_heads * shapes.remote.keys
        parts = math.gcd(self.parallel.overlap_parts(on_cuda=self.parallel.device != "cpu"), key_heads)
        merged = shapes.remote is not None and (shapes.local is not None or parts > 1)
        outputs = 1
        if merged:
            outputs = 2
        return rows + tokens * heads * outputs

    def latent_attention(self, shapes: Shapes) -> float:
        """The same for latent attention.

        Z is the width of the latent, A the rotated dimensions of the key. A token keeps the projected row twice, as the
        input of a norm and of the up-projection, Z + A each; the queries, N H; and the output, N W. Each expanded row
        keeps the key, N H, and the projection's output with the value, N (H - A + W). With an exchange, rows are
        expanded for local and for remote pieces, or keys and values are exchanged. A kernel whose values must have the
        keys' size gets copies of N H, and its output has N H, too.
        """
        model = self.model
        tokens = shapes.tokens
        recomputed = "core_attn" in self.again
        has_narrow_values = self.has_narrow_values()
        key = self.heads * model.head_size
        output = self.heads * model.v_head_dim
        value = key
        if has_narrow_values:
            value = self.heads * (model.qk_head_dim + model.v_head_dim)
        latent = model.kv_lora_rank + model.qk_pos_emb_head_dim
        exchanges_latent = latent < key + output

        kept = tokens * (latent / self.s + latent + 2 * (model.q_lora_rank or 0) / self.s + key)
        if recomputed and exchanges_latent:
            kept += tokens * model.qk_pos_emb_head_dim
        elif recomputed or shapes.scheme is not Scheme.EXCHANGE:
            kept += tokens * (key + value)
        else:
            if shapes.local is not None and exchanges_latent:
                kept += shapes.local.keys * (key + value)
            elif shapes.local is not None:
                kept += tokens * key + shapes.local.keys * value
            if shapes.remote is not None and exchanges_latent:
                kept += shapes.remote.keys * (latent + key + value)
            elif shapes.remote is not None:
                kept += shapes.remote.keys * (key + output)
                if not has_narrow_values:
                    kept += shapes.remote.keys * key
            if shapes.local is not None and shapes.remote is not None:
                kept += tokens * output
        if has_narrow_values or recomputed:
            kept += tokens * output
        else:
            kept += tokens * (output + key)

        per_token = 4 / self.s  # statistics of norms
        if model.q_lora_rank:
            per_token *= 2
        if not recomputed:
            per_token += 4 * self.heads
        return self.e * kept + tokens * (per_token + 2 * self.e * model.rotary_size)

    def has_narrow_values(self) -> bool:
        """Return whether attention's kernel takes the values of latent attention in their own size."""
        model = self.model
        device = torch.device("cpu" if self.parallel.device == "cpu" else "cuda")
        dtype = torch.bfloat16 if self.config.training.bf16 else torch.float32
        backends = suited(self.parallel.attention_backend, device, dtype, model.head_size, sinks=model.has_sinks)
        backend = BACKENDS[next(iter(backends), "reference")]
        return backend.narrow_values(model.head_size, model.v_head_dim)

    # --- what the layers of the stage keep for all micro-batches in flight

    def activations(self) -> float:
        """All layers in flight.

        Full recomputation keeps the input of each group of layers. The output of a stage is kept until its gradient
        arrives; an interleaved pipeline prefetches the next input and the next gradient.
        """
        parallel = self.parallel
        flights = self.flights
        outputs = len(flights) * self.stream
        if len(self.chunks) > 1:
            outputs += 2 * self.stream
        elif self.last:
            outputs = 0
        kept_by_chunk = self.kept_by_chunk()
        kept = sum(kept_by_chunk[chunk] for chunk in flights)
        if parallel.recompute_granularity != "full":
            return kept + outputs
        angles = 4 * self.model.rotary_size * self.t  # fp32, the same for all layers with the same base
        if self.model.rotary_base_local is not None:
            angles *= 2
        if parallel.recompute_method == "uniform":
            return self.layer_inputs()[0] * self.stream + angles + outputs
        recomputed = sum(min(self.chunks[chunk], parallel.recompute_num_layers) for chunk in flights)
        return recomputed * self.stream + kept + angles + outputs

    def kept_by_chunk(self) -> list[float]:
        """Return what each model chunk keeps for its layers that are not recomputed; by blocks, for the last ones."""
        options = self.config.mask_options()
        recomputed = 0
        if self.parallel.recompute_granularity == "full":
            recomputed = self.parallel.recompute_num_layers
        kept_by_kind: dict[tuple[bool, bool], float] = {}
        chunks = []
        end = 0
        for size in self.chunks:
            layers = self.layers[end + recomputed : end + size]
            end += size
            kinds = Counter((options.is_local_layer(layer + 1), self.model.has_experts(layer)) for layer in layers)
            for is_local, experts in kinds.keys() - kept_by_kind.keys():
                kept_by_kind[is_local, experts] = self.layer(self.shapes[is_local], experts)
            chunks.append(sum(count * kept_by_kind[kind] for kind, count in kinds.items()))
        return chunks

    @property
    def flights(self) -> tuple[int, ...]:
        """The model chunks in flight, by number, when they have most layers.

        As many as at the first backward pass are in flight until the last forward pass.
        """
        behind = self.pp - self.stage
        chunks = len(self.chunks)
        flights = behind
        if chunks > 1:
            flights = 2 * (behind - 1) + (chunks - 1) * self.pp + 1
        total = self.microbatches * chunks
        return _fullest_flights(self.chunks, self.pp, min(flights, total), total)

    def layer_inputs(self) -> tuple[int, int]:
        """Return how many inputs of recomputed layers are on the device, and on the host.

        The last input of each chunk in flight stays on the device, and so does one that another stage has sent.
        """
        on_device = 0
        on_host = 0
        for chunk in self.flights:
            groups = self.chunks[chunk] // self.parallel.recompute_num_layers
            was_sent = self.stage > 0 or chunk > 0
            kept = groups
            if self.parallel.offload_layer_inputs:
                kept = min(groups, 1 + was_sent)
            on_device += kept
            on_host += groups - kept
        return on_device, on_host

    # --- peaks

    def layer_backward(self, experts: bool) -> float:
        """One layer's backward pass, in its MLP or in attention.

        Full recomputation adds the layers of a group. By blocks it adds a layer only if a chunk in flight keeps none:
        a chunk's kept layers are its last ones, and free as much before the others are recomputed. A recomputed module
        adds its kept tensors and its output; a norm adds its output twice, because Megatron recomputes it and copies it
        back. Attention runs after the MLP and the norm before it have been freed.
        """
        parallel = self.parallel
        model = self.model
        recomputed = 0.0
        if parallel.recompute_granularity == "full":
            if parallel.recompute_method == "uniform":
                group = parallel.recompute_num_layers
            else:
                group = int(any(self.chunks[chunk] <= parallel.recompute_num_layers for chunk in self.flights))
            recomputed = group * max(self.layer(shapes, experts) for shapes in self.shapes)
        mlp = self.mlp_backward(experts)
        freed = 2 * self.stream
        if parallel.mlp_block_tokens is not None:
            # a block has its MLP and the gradient of its input; the gradients of the weights exist twice, for the
            # block and summed
            block = min(parallel.mlp_block_tokens / self.t, 1)
            mlp = block * (mlp + self.mlp(experts) + self.stream) + self.stream
            mlp += (1 - block) * self.gathered  # attention's gather buffer stays
            matrices = 2 + self.block.gated_mlp
            mlp += (4 + self.e) * matrices * model.hidden_size * model.ffn_hidden_size / self.tp
        elif "mlp" in self.again:
            mlp += self.mlp(experts) + self.stream
        else:
            freed += self.mlp(experts)
        if "layernorm" in self.again:
            mlp += 2 * self.stream
        attention = self.gathered + max(map(self.attention_backward, self.shapes)) - freed
        if parallel.offload_layer_inputs:
            recomputed += self.stream  # the input of the layer before
        return recomputed + self.stream + max(mlp, attention)

    @property
    def gathered(self) -> float:
        """The buffer that gathers a tensor of [t, D] under sequence parallelism."""
        return self.whole if self.s > 1 else 0

    def mlp_backward(self, experts: bool) -> float:
        """Gradients inside the MLP.

        Experts need more in their forward pass: copies of k tokens as they are sent, under expert parallelism as they
        arrive, and their output twice; tensor-parallel ranks sum the output in the router's fp32; and the shared
        experts' output. Otherwise either the gradients inside, or under sequence parallelism the gathered gradient of
        the output and the product's gradient; the buffer that gathers a matrix's input stays.
        """
        model = self.model
        parallel = self.parallel
        if experts:
            sent = self.stream * model.moe_router_topk
            gathered = sent * self.s
            taken = sent
            if parallel.expert_model_parallel_size > 1:
                taken += sent
            if model.num_experts == parallel.expert_model_parallel_size:
                taken += gathered
            else:
                taken += 2 * gathered
            if self.tp > 1:
                taken += (gathered + sent) * 4 / self.e + self.whole
            if not model.moe_shared_expert_intermediate_size:
                taken -= self.stream
            return taken
        inside = (1 + self.block.gated_mlp) * self.inner
        if self.s == 1:
            return inside
        return self.whole + max(inside, self.whole + self.inner)

    def attention_backward(self, shapes: Shapes) -> float:
        """Gradients of attention's output, queries, keys and values, and scratch memory.

        Recomputed attention adds its output and statistics.
        """
        model = self.model
        taken = self.e * shapes.tokens * (self.heads + self.attended_key_heads(shapes)) * model.key_value_size
        if "core_attn" in self.again:
            taken += shapes.tokens * self.heads * (self.e * model.head_size + 4)
        heads = self.heads
        key_heads = self.key_heads
        if shapes.scheme is Scheme.ULYSSES:
            heads //= self.parallel.context_parallel_size
            key_heads = max(key_heads // self.parallel.context_parallel_size, 1)
        # as of FlashAttention 2
        scratch = (flash_backward_scratch(*call, heads, key_heads, model.head_size, self.e) for call in shapes.calls)
        return taken + max(scratch)

    def loss_head(self) -> float:
        """The output layer and loss, and the final hidden states.

        A block of fp32 logits is overwritten by its gradient. The weight's gradient is added to Megatron's buffer.
        A bias is a column of a copy of the matrix, whose gradient is accumulated in fp32 and rounded while the last
        block still exists.
        """
        model = self.model
        e = self.e
        width = self.model.hidden_size
        rows = model.padded_vocab_size(self.vocab_size) // self.tp
        logits = 4 * min(self.config.training.loss_block_tokens, self.t) * rows
        if self.block.output_bias:
            width += 8  # including the bias, and zeros
            logits += (2 * e + 4) * rows * width
        if self.config.training.bf16:
            logits += adding_bytes(rows, width)
        hidden = 2 * e * self.t * width + self.t * self.norm_input / self.s  # including its gradient
        if self.s > 1:
            hidden += e * self.t * width + self.stream  # the gather buffer, and its input
        return logits + hidden


def flash_backward_scratch(
    tokens: int, keys: int, segments: int, heads: int, key_heads: int, head_size: int, width: int
) -> int:
    """Return the scratch bytes of FlashAttention 2 in its backward pass, in addition to its results.

    fp32 [tokens + 128 segments, heads, head size rounded up to 32] for the unrounded query gradients, as many row sums
    for each head, and with grouped keys the gradients of keys and values for each head, of `width` bytes a number.
    """
    rows = tokens + 128 * segments
    scratch = 4 * rows * heads * (-(-head_size // 32) * 32 + 1)
    if heads != key_heads:
        scratch += 2 * keys * heads * head_size * width
    return scratch


def uncounted(config: Config) -> Iterator[str]:
    """Yield a line for each option whose memory the formulas do not model, or model under an assumption."""
    parallel = config.parallel
    training = config.training
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
