"""Set and gather weights by their global names: the same values under every layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors
from megatron_ext.checkpoint.hf.names import Parameter, find, full_shape, join, shard
from megatron_ext.config import ModelConfig
from megatron_ext.engine.parallel import Ranks

_RESIDUAL = ("o_proj", "down_proj", "dense", "fc2")
Row = tuple[Parameter, tuple[str, ...], torch.nn.Parameter]


def table_rows(chunks: Sequence[GPTModel], model: ModelConfig) -> Iterator[Row]:
    """Yield each parameter of this process with its row of the name table and its Hugging Face names."""
    for chunk in chunks:
        first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        for name, tensor in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the last stage's copy of the tied matrix
            parameter, hf_names = find(name, first_layer, model)
            yield parameter, hf_names, tensor


@torch.no_grad()
def initialise(chunks: Sequence[GPTModel], model: ModelConfig, vocab_size: int, seed: int, ranks: Ranks) -> None:
    """Set every weight from (seed, Hugging Face name): the same model under every layout.

    Matrices are normal with standard deviation `init_method_std`; those that write to the residual stream
    (`_RESIDUAL`) are scaled by 1 / sqrt(2 * num_layers). Norms multiply by 1, biases are 0.
    """
    for parameter, hf_names, tensor in table_rows(chunks, model):
        full = [_initial(name, model, vocab_size, seed) for name in hf_names]
        tensor.copy_(shard(parameter, full, model, ranks.tensor, ranks.tensor_size))


def _initial(name: str, model: ModelConfig, vocab_size: int, seed: int) -> Tensor:
    shape = full_shape(name, model, vocab_size)
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # a norm; Gemma's multiply by 1 more than their weight
        return torch.zeros(shape) if model.block == "gemma3" else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    residual = name.split(".")[-2] in _RESIDUAL
    deviation = model.init_method_std / math.sqrt(2 * model.num_layers) if residual else model.init_method_std
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


@torch.no_grad()
def load_hugging_face(
    chunks: Sequence[GPTModel], source: HuggingFaceTensors, model: ModelConfig, vocab_size: int, ranks: Ranks
) -> None:
    """Set every weight from a Hugging Face folder; each process reads what it holds.

    Raises:
        UserError: a tensor that is missing, of another shape, or that this model has no place for; by name.
    """
    source.check(model, vocab_size)
    model = replace(model, make_vocab_size_divisible_by=chunks[0].vocab_size)  # the chunks' padding
    for parameter, hf_names, tensor in table_rows(chunks, model):
        full = [source.read(name) for name in hf_names]
        tensor.copy_(shard(parameter, full, model, ranks.tensor, ranks.tensor_size))


def gather(chunks: Sequence[GPTModel], model: ModelConfig, vocab_size: int, ranks: Ranks) -> dict[str, Tensor] | None:
    """Collect the whole model by Hugging Face names on the CPU of process 0; None on the others; all call it."""
    mine: dict[str, Tensor] = {}
    for parameter, hf_names, tensor in table_rows(chunks, model):
        shards = [torch.empty_like(tensor) for _ in range(ranks.tensor_size)]
        dist.all_gather(shards, tensor.detach().contiguous(), group=ranks.tensor_group)
        if ranks.tensor == 0 and ranks.data == 0:
            parts = join(parameter, shards, model, vocab_size)
            mine |= {name: part.cpu().contiguous() for name, part in zip(hf_names, parts, strict=True)}
    everyone: list[dict[str, Tensor]] | None = [{} for _ in range(ranks.world_size)] if ranks.world == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    if everyone is None:
        return None
    return {name: tensor for part in everyone for name, tensor in sorted(part.items())}
