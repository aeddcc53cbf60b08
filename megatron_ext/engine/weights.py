"""Set and gather weights by their global names, with the same values under every layout."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_ext.checkpoint.parameters import Cut, Parameter, Place, find, full_shape, fuse_into, parameters_of, unfuse
from megatron_ext.checkpoint.tensors import Shard
from megatron_ext.config import ModelConfig
from megatron_ext.engine import agreement
from megatron_ext.engine.parallel import Ranks

_RESIDUAL = ("o_proj", "down_proj", "dense", "fc2", "w2")


@dataclass(frozen=True)
class Weight:
    """A parameter or expert bias of this process, as stored in a checkpoint."""

    # row, place: its row of the name table, and its place in the model
    row: Parameter
    place: Place
    parameter: Tensor
    shards: list[Shard]  # its parts, consecutive rows: usually one; gate and up for a SwiGLU matrix
    original: bool  # whether this copy is saved, among equal parameters on other tensor-parallel ranks and stages
    first_copy: bool  # whether it is also the first of its data-parallel copies


def saved_weights(chunks: Sequence[GPTModel], model: ModelConfig, ranks: Ranks) -> Iterator[Weight]:
    first_expert = ranks.expert * (model.num_experts or 0) // ranks.expert_size
    for chunk in chunks:
        first_layer = 0
        if len(chunk.decoder.layers):
            first_layer = chunk.decoder.layers[0].layer_number - 1
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
        for name, parameter in itertools.chain(chunk.named_parameters(), biases):
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the last stage's copy of the tied matrix
            row, place = find(name, first_layer, model, first_expert)
            tied_copy = row.megatron[0].startswith("embedding.") and not chunk.pre_process
            original = not tied_copy and (row.cut is not Cut.WHOLE or ranks.tensor == 0)
            copy = ranks.data + ranks.context
            if row.of_experts:
                copy = ranks.expert_copy
            first_copy = original and copy == 0
            shards = shards_of(row, place, parameter, ranks.tensor, ranks.tensor_size, writes=first_copy)
            yield Weight(row, place, parameter, shards, original, first_copy)


def mark_parts(chunks: Sequence[GPTModel], model: ModelConfig, ranks: Ranks) -> None:
    """Mark the weights that tensor-parallel ranks hold in parts, and the dimension of the cut.

    Gradient norms and Muon need the marks.

    How experts are marked depends on the versions of Megatron-Core and Transformer Engine, and is wrong in some. Remove
    when all supported ones mark them.
    """
    for weight in saved_weights(chunks, model, ranks):
        parameter: Any = weight.parameter
        cut = weight.row.cut
        parameter.tensor_model_parallel = cut is not Cut.WHOLE
        parameter.partition_dim = {Cut.WHOLE: -1, Cut.COLUMNS: 1}.get(cut, 0)


def shards_of(
    row: Parameter, place: Place, tensor: Tensor, rank: int, ranks: int, *, writes: bool = True
) -> list[Shard]:
    """Return the parts of a tensor-parallel rank's parameter in the whole tensor, which is fused as in Megatron.

    A rank holds some rows or columns:

        COLUMNS           +--+--+      GATE_UP   +----+ gate, rank 0      other cuts   +----+ rank 0
                          |0 |1 |                +----+ gate, rank 1                   +----+ rank 1
                          +--+--+                +----+ up, rank 0
    """
    axis = int(row.cut is Cut.COLUMNS)
    if row.cut is Cut.WHOLE:
        rank = 0
        ranks = 1
    parts = [tensor.detach()]
    if row.cut is Cut.GATE_UP:
        parts = list(tensor.detach().chunk(2))
    shards = []
    for number, part in enumerate(parts):
        shape = list(tensor.shape)
        shape[axis] *= ranks
        offset = [0] * tensor.dim()
        offset[axis] = (number * ranks + rank) * part.shape[axis]
        shards.append(Shard.of(row.checkpoint(place), part, tuple(shape), tuple(offset), writes=writes))
    return shards


@torch.no_grad()
def set_weights(
    chunks: Sequence[GPTModel], model: ModelConfig, vocab_size: int, ranks: Ranks, tensor_of: Callable[[str], Any]
) -> None:
    """Set every weight of this process from Hugging Face tensors; rows of padding become 0.

    `tensor_of` returns the tensor of a name, or a safetensors slice, of which only this process's part is read.
    """
    for weight in saved_weights(chunks, model, ranks):
        tensors = [tensor_of(name) for name in weight.row.names(weight.place)]
        for shard in weight.shards:
            fuse_into(shard.data(), shard.offset, weight.row, tensors, model, vocab_size)


def initialise(chunks: Sequence[GPTModel], model: ModelConfig, vocab_size: int, seed: int, ranks: Ranks) -> None:
    """Set every weight as a function of (seed, Hugging Face name), so that every layout gives the same model.

    Matrices are normally distributed, see `deviation`. Norms multiply by 1, biases and attention sinks are 0.
    """

    def initial(name: str) -> Tensor:
        shape = full_shape(name, model, vocab_size)
        if len(shape) == 1:
            is_zero = name.endswith(("bias", "sinks")) or model.traits.zero_centred_norm
            return torch.full(shape, float(not is_zero))
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.empty(shape).normal_(0.0, deviation(name, model), generator=generator)

    set_weights(chunks, model, vocab_size, ranks, initial)


def deviation(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of a matrix's initial values.

    Matrices that write to the residual stream have a smaller one:

        scheme       `_RESIDUAL`                                all others, including the embedding
        megatron     init_method_std / sqrt(2 num_layers)       init_method_std
        tinyllama    1 / (sqrt(hidden_size) num_layers)         sqrt(2 / (5 hidden_size))

    SkyLadder (arXiv 2503.15450) is based on TinyLlama's code.
    """
    writes_residual = name.split(".")[-2] in _RESIDUAL
    if model.init_scheme == "tinyllama":
        if writes_residual:
            return 1 / (math.sqrt(model.hidden_size) * model.num_layers)
        return math.sqrt(2 / (5 * model.hidden_size))
    if writes_residual:
        return model.init_method_std / math.sqrt(2 * model.num_layers)
    return model.init_method_std


def gather(chunks: Sequence[GPTModel], model: ModelConfig, vocab_size: int, ranks: Ranks) -> dict[str, Tensor] | None:
    """Return the whole model by Hugging Face names on the CPU of process 0, None on the others. Collective."""
    shards = [shard for weight in saved_weights(chunks, model, ranks) for shard in weight.shards if shard.writes]
    parts = agreement.gather([(shard.name, shard.shape, shard.offset, shard.data().cpu().clone()) for shard in shards])
    if ranks.world > 0:
        return None
    wholes: dict[str, Tensor] = {}
    for name, shape, offset, part in itertools.chain(*parts):
        if name not in wholes:
            wholes[name] = part.new_empty(shape)
        wholes[name][tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))] = part
    return {
        name: tensor
        for row in parameters_of(model)
        for place in row.places(model)
        for name, tensor in zip(
            row.names(place), unfuse(row, wholes[row.checkpoint(place)], model, vocab_size), strict=True
        )
    }
