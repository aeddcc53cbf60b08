"""Imported weights are those of whole tensors on every tensor-parallel rank; deviations of the initial ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors
from megatron_ext.checkpoint.parameters import Cut, Parameter, full_shape, fuse_into, parameters_of
from megatron_ext.config import ModelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.engine.weights import deviation, shards_of

VOCABULARY = 57  # padded to 64
FLAGS = """--num-layers 3 --hidden-size 40 --ffn-hidden-size 36 --num-attention-heads 8 --num-query-groups 4
    --kv-channels 6 --add-qkv-bias --softmax-type learnable --make-vocab-size-divisible-by 8"""
MODEL = parse(FLAGS.split()).model


def shard(parameter: Parameter, full: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
    """Cut a TP rank's Megatron tensor from the full Hugging Face tensors at once: others are filled in parts."""
    if parameter.cut is Cut.WHOLE:
        return full[0]
    if parameter.cut is Cut.COLUMNS:
        return full[0].chunk(tp_size, dim=1)[tp_rank]
    if parameter.cut is Cut.VOCABULARY:
        missing = MODEL.padded_vocab_size(len(full[0])) - len(full[0])
        padded = torch.cat([full[0], full[0].new_zeros(missing, *full[0].shape[1:])])
        return padded.chunk(tp_size)[tp_rank]
    if parameter.cut is Cut.QKV:
        by_group = [part.unflatten(0, (MODEL.num_query_groups, -1)) for part in full]
        return torch.cat(by_group, dim=1).chunk(tp_size)[tp_rank].flatten(0, 1)
    return torch.cat([part.chunk(tp_size)[tp_rank] for part in full])


def names(parameter: Parameter) -> list[str]:
    return [name.format(1) for name in parameter.hugging_face]


def filled(parameter: Parameter, like: Tensor, tensors: Sequence[Any], rank: int, tp: int) -> Tensor:
    part = torch.full_like(like, torch.nan)
    for shard_ in shards_of(parameter, (1, 0), part, rank, tp):
        fuse_into(shard_.data(), shard_.offset, parameter, tensors, MODEL, VOCABULARY)
    return part


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_hugging_face_folder_is_read_in_parts(tmp_path: Path, tp: int) -> None:
    tensors = {
        name: torch.randn(full_shape(name, MODEL, VOCABULARY), dtype=torch.float64)
        for parameter in parameters_of(MODEL)
        for name in names(parameter)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = HuggingFaceTensors(tmp_path)
    read = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, index: Any) -> Tensor:
            read.append(source.open(self.name)[index])
            return read[-1]

    for parameter in parameters_of(MODEL):
        for rank in range(tp):
            expected = shard(parameter, [tensors[name] for name in names(parameter)], rank, tp)
            part = filled(parameter, expected, [Counting(name) for name in names(parameter)], rank, tp)
            assert torch.equal(part, expected), (parameter.megatron[0], rank)
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2)
    vectors = sum(tensor.numel() for name, tensor in tensors.items() if tensor.ndim == 1)
    assert matrices <= sum(part.numel() for part in read) <= matrices + tp * vectors  # each rank its own share, once


SIZES = {"num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 4}
INNER = ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
RESIDUAL = ("model.layers.3.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight")


def test_deviations_by_hand() -> None:
    """Width 256, 8 layers. TinyLlama: sqrt(2 / 1280) = 0.0395, 1 / (16 * 8) = 0.0078. Megatron: 0.02, 0.02 / 4."""
    tinyllama = ModelConfig(**SIZES, init_scheme="tinyllama")
    megatron = ModelConfig(**SIZES)
    for name in INNER:
        assert deviation(name, tinyllama) == pytest.approx(0.0395285, rel=1e-5)
        assert deviation(name, megatron) == 0.02
    for name in RESIDUAL:
        assert deviation(name, tinyllama) == 1 / 128
        assert deviation(name, megatron) == 0.005
