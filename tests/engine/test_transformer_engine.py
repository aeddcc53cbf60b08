"""The model with Transformer Engine's layers, if it can be imported; without a GPU.

python -m pytest tests/engine/test_transformer_engine.py
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_process import one_process

from megatron_ext.checkpoint.hf.names import parameters_of
from megatron_ext.config import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import PackedAttention, build_chunks
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.weights import initialise, table_rows

pytestmark = pytest.mark.slow
VOCABULARY = 64
try:
    importlib.import_module("transformer_engine.pytorch")
except (ImportError, OSError) as error:
    pytest.skip(f"Transformer Engine cannot be imported: {error}", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("one CPU process; a GPU runs benchmarks/gpu.sh", allow_module_level=True)
MODEL = ModelConfig(num_layers=2, vocab_size=VOCABULARY)


@pytest.fixture
def chunk() -> Iterator[Any]:
    """Built as on CUDA, with Transformer Engine's layers, on the CPU."""
    config = Config(
        model=MODEL,
        data=DataConfig(seq_length=32),
        training=TrainingConfig(bf16=True),
    )
    with one_process():
        platform.choose("cpu")
        cpu = Platform(torch.device("cpu"), "gloo", transformer_engine=True)
        ranks = parallel.start(config.parallel, 2, cpu, seed=1)
        (built,) = build_chunks(config, VOCABULARY, cpu)
        initialise([built], config.model, VOCABULARY, 1, ranks)
        yield built


def test_every_weight_has_a_name_and_an_initial_value(chunk: Any) -> None:
    found = [(parameter.megatron[-1], tensor) for parameter, _, tensor in table_rows([chunk], MODEL)]
    stacked = [parameter for parameter in parameters_of(ModelConfig(num_layers=2)) if parameter.stacked]
    assert len(found) == 2 * len(stacked) + 3  # the embedding, the last norm and the output matrix
    assert all(torch.isfinite(tensor).all() for _, tensor in found)
    assert any("linear_qkv.layer_norm_weight" in name for name, _ in found)


def test_only_attention_is_ours(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        assert isinstance(layer.self_attention.core_attention, PackedAttention)
        for matrix in (layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.mlp.linear_fc1):
            assert type(matrix).__module__ == "megatron.core.extensions.transformer_engine"
