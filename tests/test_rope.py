"""Rotary angles against transformers' Llama and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_ext.rope import angles, inverse_frequencies

POSITIONS = torch.tensor([0, 1, 2, 17, 4095, 32_767, 524_287], dtype=torch.int32)
SIZES_AND_BASES = [(2, 1e4), (64, 1e4), (64, 1e6), (128, 5e5), (128, 1.28e8), (96, 1e5)]


@pytest.mark.parametrize(("size", "base"), SIZES_AND_BASES)
def test_equals_transformers(size: int, base: float) -> None:
    config = LlamaConfig(
        hidden_size=2 * size,
        num_attention_heads=2,
        head_dim=size,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = inverse_frequencies(size, base)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    cos, sin = theirs(torch.zeros(1), POSITIONS[None].long())
    turned = angles(POSITIONS, theirs.inv_freq)
    torch.testing.assert_close(turned.cos(), cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(turned.sin(), sin[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("size", "base"), SIZES_AND_BASES)
def test_frequencies_by_the_formula(size: int, base: float) -> None:
    wanted = [base ** (-2 * k / size) for k in range(size // 2)]
    torch.testing.assert_close(
        inverse_frequencies(size, base).double(), torch.tensor(wanted, dtype=torch.float64), rtol=2e-6, atol=0
    )


def test_literal_angles() -> None:
    assert inverse_frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])
    turned = angles(torch.tensor([0, 3]), inverse_frequencies(4, 100.0))
    torch.testing.assert_close(turned, torch.tensor([[0, 0, 0, 0], [3, 0.3, 3, 0.3]]))
    assert turned.dtype == torch.float32


def test_large_positions_are_exact_in_float32() -> None:
    turned = angles(torch.tensor([524_287, 2**24 - 1], dtype=torch.int32), inverse_frequencies(64, 1e4))
    assert turned[:, 0].tolist() == [524_287.0, 2.0**24 - 1]  # bfloat16 would give 524288


def scores(query_tH: Tensor, key_tH: Tensor, positions: Tensor) -> Tensor:
    turned = angles(positions, inverse_frequencies(16, 1e4).double())
    query, key = apply_rotary_pos_emb(query_tH[None, None], key_tH[None, None], turned.cos()[None], turned.sin()[None])
    return (query @ key.transpose(-1, -2))[0, 0]


def test_only_differences_of_positions_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(5, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    near, far = torch.arange(5), torch.arange(5) + 1000
    torch.testing.assert_close(scores(query, key, near), scores(query, key, far), rtol=0, atol=1e-10)
    assert not torch.allclose(scores(query, key, near), scores(query, key, 2 * near), atol=1e-3)
