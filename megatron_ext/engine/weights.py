"""Set and gather weights by their global names, with the same values under every layout."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors
from megatron_ext.checkpoint.hf.names import Cut, Parameter, Piece, Place, columns, find, full_shape, join, pieces
from megatron_ext.checkpoint.tensors import Shard
from megatron_ext.config import ModelConfig
from megatron_ext.engine.parallel import Ranks

_RESIDUAL = ("o_proj", "down_proj", "dense", "fc2", "w2")
Row = tuple[Parameter, Place, Tensor]
# (tensor name, wanted pieces, columns) -> blocks of rows, each with the number of its first row
Blocks = Callable[[str, Sequence[Piece], slice | None], Iterator[tuple[int, Tensor]]]
BLOCK = 2**22  # elements that the host holds at a time: 16 MiB of fp32
_RUN = 16


def table_rows(chunks: Sequence[GPTModel], model: ModelConfig, expert: tuple[int, int] = (0, 1)) -> Iterator[Row]:
    """Yield each parameter and expert bias of this process, with its row of the name table and its place in the model.

    `expert` is the expert-parallel rank and size.
    """
    first_expert = expert[0] * (model.num_experts or 0) // expert[1]
    for chunk in chunks:
        first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
        for name, tensor in itertools.chain(chunk.named_parameters(), biases):
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the last stage's copy of the tied matrix
            parameter, place = find(name, first_layer, model, first_expert)
            yield parameter, place, tensor


@dataclass(frozen=True)
class Weight:
    """A parameter or expert bias of this process as stored in a checkpoint.

    Attributes:
        parameter: Megatron's tensor.
        shards: its parts, consecutive rows: usually one; gate and up for a SwiGLU matrix.
        original: whether this copy is saved, among equal parameters on other tensor-parallel ranks and stages.
        first_copy: whether it is also the first of its data-parallel copies.
    """

    parameter: Tensor
    shards: list[Shard]
    original: bool
    first_copy: bool


def saved_weights(chunks: Sequence[GPTModel], model: ModelConfig, ranks: Ranks) -> Iterator[Weight]:
    """Yield the parameters and expert biases of this process as stored in a checkpoint.

    A checkpoint stores whole tensors, fused as in Megatron; each process holds some of their rows or columns:

        COLUMNS           +--+--+      GATE_UP   +----+ gate, rank 0      other cuts   +----+ rank 0
                          |0 |1 |                +----+ gate, rank 1                   +----+ rank 1
                          +--+--+                +----+ up, rank 0
    """
    for chunk in chunks:
        for row, place, parameter in table_rows([chunk], model, (ranks.expert, ranks.expert_size)):
            tied_copy = row.megatron[0].startswith("embedding.") and not chunk.pre_process
            original = not tied_copy and (row.cut is not Cut.WHOLE or ranks.tensor == 0)
            copy = ranks.expert_copy if row.of_experts else ranks.data + ranks.context
            first_copy = original and copy == 0
            axis, size = int(row.cut is Cut.COLUMNS), 1 if row.cut is Cut.WHOLE else ranks.tensor_size
            parts = parameter.detach().chunk(2) if row.cut is Cut.GATE_UP else [parameter.detach()]
            shards = []
            for number, part in enumerate(parts):
                shape, offset = list(parameter.shape), [0] * parameter.dim()
                shape[axis] *= size
                offset[axis] = (number * size + ranks.tensor % size) * part.shape[axis]
                name = row.checkpoint(place)
                shards.append(Shard.of(name, part, tuple(shape), tuple(offset), writes=first_copy))
            yield Weight(parameter, shards, original, first_copy)


@torch.no_grad()
def initialise(chunks: Sequence[GPTModel], model: ModelConfig, vocab_size: int, seed: int, ranks: Ranks) -> None:
    """Set every weight as a function of (seed, Hugging Face name), so that every layout gives the same model.

    Matrices are normally distributed, see `deviation`. Norms multiply by 1, biases and attention sinks are 0.
    """
    blocks = Initial(model, vocab_size, seed).blocks
    for parameter, place, tensor in table_rows(chunks, model, (ranks.expert, ranks.expert_size)):
        names, mine = parameter.names(place), (ranks.tensor, ranks.tensor_size)
        fill(tensor, parameter, names, model, vocab_size, mine, blocks)


@torch.no_grad()
def blank(chunks: Sequence[GPTModel]) -> None:
    """Set every weight to 0 before loading, because no file contains the rows of padding."""
    for chunk in chunks:
        for weight in chunk.parameters():
            weight.zero_()


def fill(
    tensor: Tensor,
    parameter: Parameter,
    hf_names: Sequence[str],
    model: ModelConfig,
    vocab_size: int,
    tensor_rank: tuple[int, int],
    blocks: Blocks,
) -> None:
    """Set one tensor-parallel rank's Megatron tensor block by block, so that the host holds one block at a time.

    Rows of padding become 0. `tensor_rank` is the tensor-parallel rank and size.
    """
    if parameter.cut is Cut.VOCABULARY:
        tensor.zero_()
    mine = pieces(parameter, model, vocab_size, *tensor_rank)
    for source, name in enumerate(hf_names):
        wanted = [piece for piece in mine if piece.source == source]
        shape = full_shape(name, model, vocab_size)
        wide = columns(parameter, shape[1], *tensor_rank) if len(shape) == 2 else None
        for first, rows in blocks(name, wanted, wide):
            for piece in wanted:
                begin, end = max(first, piece.first), min(first + len(rows), piece.last)
                if begin < end:
                    at = piece.at + begin - piece.first
                    tensor[at : at + end - begin].copy_(rows[begin - first : end - first])


class Initial:
    """Generates initial weights; each tensor is one random stream, independent of which parts a process needs.

    torch generates a tensor of n >= 16 normal numbers from n uniform ones in runs of 16, plus 16 more for the last 16
    if n is not a multiple of 16. So a tensor can be generated block by block if the size of each block but the last is
    a multiple of 16, and a block that is not needed can be skipped by generating as many bytes, in a third of the time.
    tests/engine/test_weights.py compares with whole tensors.
    """

    def __init__(self, model: ModelConfig, vocab_size: int, seed: int) -> None:
        self.model, self.vocab_size, self.seed = model, vocab_size, seed

    def blocks(self, name: str, wanted: Sequence[Piece], wide: slice | None) -> Iterator[tuple[int, Tensor]]:
        """Yield the blocks of a tensor that contain wanted rows, each with its first row, in ascending order."""
        shape = full_shape(name, self.model, self.vocab_size)
        if wide is None:
            # a bias, sinks or a norm; Gemma's norms multiply by 1 + weight
            zero = name.endswith(("bias", "sinks")) or self.model.block == "gemma3"
            yield 0, torch.zeros(shape) if zero else torch.ones(shape)
            return
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        std = deviation(name, self.model)
        rows, width = shape
        for first, last in _row_blocks(rows, width):
            if all(piece.last <= first for piece in wanted):
                return
            if any(piece.first < last and piece.last > first for piece in wanted):
                yield first, torch.empty(last - first, width).normal_(0.0, std, generator=generator)[:, wide]
            else:
                torch.empty((last - first) * width, dtype=torch.uint8).random_(generator=generator)


def deviation(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of a matrix's initial values.

    Matrices that write to the residual stream have a smaller one:

        scheme       `_RESIDUAL`                                all others, including the embedding
        megatron     init_method_std / sqrt(2 num_layers)       init_method_std
        tinyllama    1 / (sqrt(hidden_size) num_layers)         sqrt(2 / (5 hidden_size))

    SkyLadder (arXiv 2503.15450) is based on TinyLlama's code.
    """
    residual = name.split(".")[-2] in _RESIDUAL
    if model.init_scheme == "tinyllama":
        width = model.hidden_size
        return 1 / (math.sqrt(width) * model.num_layers) if residual else math.sqrt(2 / (5 * width))
    return model.init_method_std / math.sqrt(2 * model.num_layers) if residual else model.init_method_std


def _row_blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the range [first, last) of each block of about BLOCK elements; block heights are multiples of 16."""
    step = max(BLOCK // width // _RUN, 1) * _RUN
    first = 0
    while first < rows:
        last = min(first + step, rows)
        if (rows - last) * width < _RUN:
            last = rows
        yield first, last
        first = last


def hugging_face_blocks(source: HuggingFaceTensors) -> Blocks:
    """Return a function that reads the wanted rows, and for a matrix only the wanted columns, from a folder."""

    def blocks(name: str, wanted: Sequence[Piece], wide: slice | None) -> Iterator[tuple[int, Tensor]]:
        step = max(BLOCK // (wide.stop - wide.start), 1) if wide is not None else BLOCK
        for piece in wanted:
            for first in range(piece.first, piece.last, step):
                yield first, source.rows(name, first, min(first + step, piece.last), wide)

    return blocks


@torch.no_grad()
def load_hugging_face(
    chunks: Sequence[GPTModel], source: HuggingFaceTensors, model: ModelConfig, vocab_size: int, ranks: Ranks
) -> None:
    """Set every weight from a Hugging Face folder; each process reads only what it holds.

    Raises:
        UserError: a tensor is missing, has another shape, or does not occur in this model; the message names it.
    """
    source.check(model, vocab_size)
    model = replace(model, make_vocab_size_divisible_by=chunks[0].vocab_size)  # the chunks' padding
    blocks, mine = hugging_face_blocks(source), (ranks.tensor, ranks.tensor_size)
    for parameter, place, tensor in table_rows(chunks, model, (ranks.expert, ranks.expert_size)):
        fill(tensor, parameter, parameter.names(place), model, vocab_size, mine, blocks)


def gather(chunks: Sequence[GPTModel], model: ModelConfig, vocab_size: int, ranks: Ranks) -> dict[str, Tensor] | None:
    """Return the whole model by Hugging Face names on the CPU of process 0, None on the others. Collective."""
    mine: dict[str, Tensor] = {}
    for parameter, place, tensor in table_rows(chunks, model, (ranks.expert, ranks.expert_size)):
        shards = [torch.empty_like(tensor) for _ in range(ranks.tensor_size)]
        dist.all_gather(shards, tensor.detach().contiguous(), group=ranks.tensor_group)
        if ranks.tensor == 0 and (ranks.expert_copy if parameter.of_experts else ranks.data + ranks.context) == 0:
            parts = join(parameter, shards, model, vocab_size)
            mine |= {name: part.cpu().contiguous() for name, part in zip(parameter.names(place), parts, strict=True)}
    everyone: list[dict[str, Tensor]] | None = [{} for _ in range(ranks.world_size)] if ranks.world == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    if everyone is None:
        return None
    return {name: tensor for part in everyone for name, tensor in sorted(part.items())}
