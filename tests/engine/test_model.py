"""What Megatron is told of the model: which layers turn queries and keys, and what scales their scores."""

from __future__ import annotations

import pytest
import torch

from megatron_ext import rope
from megatron_ext.config import Config, ModelConfig
from megatron_ext.engine.model import transformer_config
from megatron_ext.engine.platform import Platform

CPU = Platform(torch.device("cpu"), "gloo", transformer_engine=False)


def test_layers_without_angles_have_no_factor_of_theirs() -> None:
    """YaRN's factor is of turned queries and keys: squared in the scores of those layers, absent from the others."""
    model = ModelConfig(
        num_layers=4,
        no_rope_freq=2,
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_original_length=64,
    )
    told = transformer_config(Config(model=model), CPU)
    factor = rope.attention_factor(model) ** 2
    assert factor > 1
    turned = [model.has_rope(number) for number in range(1, 5)]
    assert sorted(set(turned)) == [False, True]
    assert told.no_rope_freq == [int(not has_rope) for has_rope in turned]
    assert told.packed_score_factors == pytest.approx([factor if has_rope else 1.0 for has_rope in turned])
