"""Estimates the memory of one GPU from the configuration alone, by the formulas of docs/planning.md.

Legend: t tokens of this rank, D hidden, F inside the SwiGLU block, N query heads, G key heads, H head size; tp, pp, cp
and dp the tensor-, pipeline-, context- and data-parallel sizes; e the bytes of a number (bf16: 2).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from megatron_ext.checkpoint.hf.names import TABLE, Cut, all_names, full_shape
from megatron_ext.config import Config, ModelConfig

_EMBEDDING = "model.embed_tokens.weight"
_CUTS = {name: parameter.cut for parameter in TABLE for name in parameter.hugging_face}


@dataclass(frozen=True)
class Memory:
    """Holds the bytes on one GPU of a pipeline stage, part by part.

    Attributes:
        weights: the parameters as they compute.
        gradients: always fp32.
        optimizer: Adam's moments, and in bf16 runs the fp32 master weights.
        activations: what the layers keep for the backward pass, of all micro-batches in flight.
        logits: one block of logits, the output matrix's gradient and the last hidden states, on the last stage.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def static(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes of all parts; CUDA's context, NCCL's buffers and fragmentation come on top."""
        return sum(astuple(self))


def estimate(config: Config, world_size: int, vocab_size: int) -> Memory:
    """Return the memory of the fullest pipeline stage."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    memories = [stage_memory(config, world_size, vocab_size, stage) for stage in stages]
    return max(memories, key=lambda memory: memory.total)


def stage_memory(config: Config, world_size: int, vocab_size: int, stage: int) -> Memory:
    """Return the memory of one GPU of a pipeline stage, counted from 0."""
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
        optimizer=math.ceil(state * parameters / shares),
        activations=_activations(config, world_size, stage),
        logits=_logits(config, vocab_size) if last else 0,
    )


def stage_parameters(config: Config, vocab_size: int, stage: int) -> int:
    """Count the parameters that one tensor-parallel rank of a pipeline stage holds, the padded vocabulary included."""
    model, parallel = config.model, config.parallel
    last = parallel.pipeline_model_parallel_size - 1
    layers = model.num_layers // parallel.pipeline_model_parallel_size
    sizes = _sizes(model, vocab_size, parallel.tensor_model_parallel_size)
    total = sum(size for name, size in sizes.items() if "{i}" in name) * layers
    tied = not model.untie_embeddings_and_output_weights
    if stage == 0 or (tied and stage == last):  # a tied output matrix is a copy on the last stage
        total += sizes[_EMBEDDING]
    if stage == last:
        total += sum(size for name, size in sizes.items() if "{i}" not in name and name != _EMBEDDING)
    return total


def _sizes(model: ModelConfig, vocab_size: int, tensor_size: int) -> dict[str, int]:
    """Count the numbers on one tensor-parallel rank of each parameter of the name table; `{i}` stands for any layer."""
    wanted = {name.replace(".0.", ".{i}.") for name in all_names(model)}
    sizes = {}
    for name in (name for name in _CUTS if name in wanted):
        shape = full_shape(name, model, vocab_size)
        if _CUTS[name] is Cut.VOCABULARY:
            shape = (model.padded_vocab_size(vocab_size), *shape[1:])
        sizes[name] = math.prod(shape) // (1 if _CUTS[name] is Cut.WHOLE else tensor_size)
    return sizes


def layer_bytes(config: Config, tokens: int) -> int:
    """Return the bytes that one layer keeps for the backward pass of `tokens` tokens on one rank without recomputation.

    Per token, with s = tp under sequence parallelism, else 1: 2 (8 + e) D / s for the norms, which keep two fp32
    copies and their output; for attention e (N + 2 G) H / tp as computed together, e (N + G) H / tp turned, e N H / tp
    of output, 4 N / tp of normalisers, and 4 e H of cosines and sines; 5 e F / tp in the SwiGLU block; 8 / s of the
    norms' statistics. Transformer Engine's norms keep no fp32 copies: there it is an upper bound.
    """
    model, parallel = config.model, config.parallel
    tp, e = parallel.tensor_model_parallel_size, 2 if config.training.bf16 else 4
    heads, groups, size = model.num_attention_heads, model.num_query_groups, model.head_size
    outside = (2 * (8 + e) * model.hidden_size + 8) / (tp if parallel.sequence_parallel else 1)
    attention = e * ((heads + 2 * groups) + (heads + groups) + heads) * size / tp + 4 * heads / tp + 4 * e * size
    if parallel.context_parallel_size > 1 and parallel.cp_scheme != "ulysses":
        attention += 2 * e * groups * size / tp * (parallel.context_parallel_size - 1)  # keys of the whole row at most
    return math.ceil(tokens * (outside + attention + 5 * e * model.ffn_hidden_size / tp))


def final_norm_bytes(config: Config, tokens: int) -> int:
    """Return the bytes that the last norm keeps: two fp32 copies and its statistics."""
    share = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    return math.ceil(tokens * (8 * config.model.hidden_size + 4) / share)


def _activations(config: Config, world_size: int, stage: int) -> int:
    """Return the bytes that the layers of a pipeline stage keep for all micro-batches in flight."""
    model, parallel = config.model, config.parallel
    pp = parallel.pipeline_model_parallel_size
    tokens = config.data.micro_batch_size * config.data.seq_length // parallel.context_parallel_size
    chunk = parallel.num_layers_per_virtual_pipeline_stage or model.num_layers // pp
    chunks = model.num_layers // pp // chunk
    # 1F1B keeps pp - stage micro-batches before its first backward pass; interleaved chunks warm up longer.
    flights = pp - stage if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * pp + 1
    layers = min(flights, config.microbatches(world_size) * chunks) * chunk
    whole = layer_bytes(config, tokens)
    if parallel.recompute_granularity != "full":
        return layers * whole
    # Full recomputation keeps the residual stream that enters each group of layers, and one group whole.
    share = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    entry = tokens * model.hidden_size * (2 if config.training.bf16 else 4) // share
    group = parallel.recompute_num_layers
    angles = 4 * config.model.head_size * tokens  # fp32, the same ones for all layers
    if parallel.recompute_method == "uniform":
        return math.ceil(layers / group) * entry + group * whole + angles
    recomputed = math.ceil(layers * group / chunk)
    return recomputed * entry + (layers - recomputed) * whole + whole + angles


def _logits(config: Config, vocab_size: int) -> int:
    """Return the bytes of a block of logits, forward or backward, whichever is more, and of the final hidden states."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    e, rows = 2 if config.training.bf16 else 4, model.padded_vocab_size(vocab_size) // tp
    tokens = config.data.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size
    block = min(config.training.loss_block_tokens, tokens)
    narrow = e if config.training.bf16 else 0  # a copy of the gradient for the matrix products
    backward = (4 + narrow) * block * rows + (4 + e) * rows * model.hidden_size
    hidden = 2 * e * tokens * model.hidden_size + final_norm_bytes(config, tokens)
    return max(8 * block * rows, backward) + hidden
