"""Which layers of a model have RoPE, and the scale of their scores."""

from __future__ import annotations

import pytest
import torch

from megatron_ext import rope
from megatron_ext.config import Config, ModelConfig
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.transformer import transformer_config

CPU = Platform(torch.device("cpu"), "gloo", transformer_engine=False)


def test_layers_without_rope_have_no_yarn_factor() -> None:
    """YaRN multiplies rotated queries and keys: squared in the scores of those layers, absent from the others."""
    model = ModelConfig(
        num_layers=4, no_rope_freq=2, rope_scaling="yarn", rope_scaling_factor=4.0, rope_original_length=64
    )
    transformer = transformer_config(Config(model=model), CPU)
    factor = rope.attention_factor(model) ** 2
    assert factor > 1
    rotated = [model.has_rope(number) for number in range(1, 5)]
    assert sorted(set(rotated)) == [False, True]
    assert transformer.no_rope_freq == [int(not has_rope) for has_rope in rotated]
    assert transformer.packed_score_factors == pytest.approx([factor if has_rope else 1.0 for has_rope in rotated])
