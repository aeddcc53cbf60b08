"""First and imported weights, block by block, are those of whole tensors, on every tensor-parallel rank."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sharding import shard
from torch import Tensor

from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors
from megatron_ext.checkpoint.hf.names import Parameter, full_shape, parameters_of
from megatron_ext.config import ModelConfig
from megatron_ext.engine import weights
from megatron_ext.engine.weights import Initial, deviation, fill

SEED, VOCABULARY = 2**63 + 5, 57  # padded to 64
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=40,
    ffn_hidden_size=36,  # rows of 36 numbers: blocks end inside no run of 16, rows do
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=6,
    add_qkv_bias=True,
    softmax_type="learnable",
    make_vocab_size_divisible_by=8,
    init_method_std=0.1,
)


def whole(name: str, model: ModelConfig, vocab_size: int) -> Tensor:
    """A tensor as one draw gives it."""
    shape = full_shape(name, model, vocab_size)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(("bias", "sinks")) else torch.ones(shape)
    digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    factor = 1 / math.sqrt(2 * model.num_layers) if "o_proj" in name or "down_proj" in name else 1.0
    return torch.empty(shape).normal_(0.0, model.init_method_std * factor, generator=generator)


def names(parameter: Parameter) -> list[str]:
    return [name.format(i=1) for name in parameter.hugging_face]


def compare(
    model: ModelConfig, vocab_size: int, tp: int, whole_tensors: dict[str, Tensor], blocks: weights.Blocks
) -> None:
    for parameter in parameters_of(model):
        full = [whole_tensors[name] for name in names(parameter)]
        for rank in range(tp):
            expected = shard(parameter, full, model, rank, tp)
            filled = torch.full_like(expected, torch.nan)
            fill(filled, parameter, names(parameter), model, vocab_size, (rank, tp), blocks)
            assert torch.equal(filled, expected), (parameter.megatron[0], rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 700, 1000, 2**22])
def test_blocks_are_parts_of_the_whole_draw(monkeypatch: pytest.MonkeyPatch, tp: int, block: int) -> None:
    monkeypatch.setattr(weights, "BLOCK", block)
    drawn = {name: whole(name, MODEL, VOCABULARY) for each in parameters_of(MODEL) for name in names(each)}
    compare(MODEL, VOCABULARY, tp, drawn, Initial(MODEL, VOCABULARY, SEED).blocks)


@pytest.mark.parametrize(("vocab_size", "width"), [(1, 2), (2, 6), (3, 6), (17, 2), (33, 6), (35, 10)])
def test_tensors_of_hardly_more_than_a_run(monkeypatch: pytest.MonkeyPatch, vocab_size: int, width: int) -> None:
    """Fewer numbers than a run of 16, and remainders that no block of their own can draw."""
    monkeypatch.setattr(weights, "BLOCK", 16)
    model = ModelConfig(num_layers=1, hidden_size=width, num_attention_heads=1, num_query_groups=1, ffn_hidden_size=3)
    drawn = {name: whole(name, model, vocab_size) for each in parameters_of(model) for name in names(each)}
    compare(model, vocab_size, 1, drawn, Initial(model, vocab_size, SEED).blocks)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 700, 2**22])
def test_a_hugging_face_folder_is_read_by_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tp: int, block: int
) -> None:
    monkeypatch.setattr(weights, "BLOCK", block)
    tensors = {
        name: torch.randn(full_shape(name, MODEL, VOCABULARY), dtype=torch.float64)
        for each in parameters_of(MODEL)
        for name in names(each)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    read: list[int] = []

    class Counting(HuggingFaceTensors):
        def rows(self, name: str, first: int, last: int, columns: slice | None = None) -> Tensor:
            rows = super().rows(name, first, last, columns)
            read.append(rows.numel())
            return rows

    source = Counting(tmp_path)
    compare(MODEL, VOCABULARY, tp, tensors, weights.hugging_face_blocks(source))
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2)
    vectors = sum(tensor.numel() for name, tensor in tensors.items() if tensor.ndim == 1)
    assert matrices <= sum(read) <= matrices + tp * vectors  # each rank reads its own share, once
    assert max(read) <= max(block, max(tensor.shape[-1] for tensor in tensors.values()))


SIZES = {"num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 4}
INNER = ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
RESIDUAL = ("model.layers.3.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight")


def test_deviations_by_hand() -> None:
    """Width 256, 8 layers. TinyLlama: sqrt(2 / 1280) = 0.0395, 1 / (16 * 8) = 0.0078. Megatron: 0.02, 0.02 / 4."""
    tinyllama, megatron = ModelConfig(**SIZES, init_scheme="tinyllama"), ModelConfig(**SIZES)
    for name in INNER:
        assert deviation(name, tinyllama) == pytest.approx(0.0395285, rel=1e-5)
        assert deviation(name, megatron) == 0.02
    for name in RESIDUAL:
        assert deviation(name, tinyllama) == 1 / 128
        assert deviation(name, megatron) == 0.005
