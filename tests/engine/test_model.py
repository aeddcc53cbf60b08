"""The model: which layers have RoPE, the scale of their scores, and attention sinks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from one_process import build_models, one_process

from megatron_ext import rope
from megatron_ext.batch import pack
from megatron_ext.config import Config, DataConfig, ModelConfig
from megatron_ext.data.rows.dataset import TokenRow
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="one CPU process")
def test_attention_sinks() -> None:
    """They begin at 0; at -inf the model is one without; their gradients are those of a finite difference."""
    plain = Config(
        model=ModelConfig(num_layers=2, vocab_size=64, init_method_std=0.2, local_window=4, window_attn_skip_freq=2),
        data=DataConfig(seq_length=24),
    )
    chance = np.random.default_rng(0)
    row = TokenRow(chance.integers(1, 64, 25), np.array([5, 23]), np.ones(24, dtype=np.bool_))
    batch = pack([row], 24, plain.mask_options())
    with one_process():
        without, model = build_models(plain, replace(plain, model=replace(plain.model, softmax_type="learnable")))

        def loss() -> torch.Tensor:
            return model(batch).cross_entropy_t.double().sum()

        sinks = [layer.self_attention.core_attention.softmax_offset for layer in model.decoder.layers]
        assert [sink.tolist() for sink in sinks] == [[0.0] * 4] * 2
        assert all(sink.tensor_model_parallel for sink in sinks)
        loss().backward()
        with torch.no_grad():
            for sink in sinks:
                assert sink.grad.abs().min() > 1e-3
                for head in range(4):
                    either = []
                    for value in (0.05, -0.05):
                        sink[head] = value
                        either.append(loss())
                    sink[head] = 0.0
                    assert (either[0] - either[1]) / 0.1 == pytest.approx(sink.grad[head].item(), rel=0.02, abs=2e-3)
            for sink in sinks:
                sink.fill_(-torch.inf)
            torch.testing.assert_close(loss(), without(batch).cross_entropy_t.double().sum())
