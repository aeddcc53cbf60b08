"""The standard deviation of initial weights under each scheme."""

from __future__ import annotations

import pytest

from megatron_ext.config import ModelConfig
from megatron_ext.engine.weights import deviation

MODEL = {"num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 4}
INNER = ("model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
RESIDUAL = ("model.layers.3.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight")


def test_deviations_by_hand() -> None:
    """Width 256, 8 layers. TinyLlama: sqrt(2 / 1280) = 0.0395, 1 / (16 * 8) = 0.0078. Megatron: 0.02, 0.02 / 4."""
    tinyllama, megatron = ModelConfig(**MODEL, init_scheme="tinyllama"), ModelConfig(**MODEL)
    for name in INNER:
        assert deviation(name, tinyllama) == pytest.approx(0.0395285, rel=1e-5)
        assert deviation(name, megatron) == 0.02
    for name in RESIDUAL:
        assert deviation(name, tinyllama) == 1 / 128
        assert deviation(name, megatron) == 0.005
