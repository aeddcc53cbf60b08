"""Rotary angles against 60 digits; checkpoint/hf/test_rope.py has them against transformers."""

import math
from decimal import Decimal, getcontext
from fractions import Fraction
from typing import Any

import pytest
import torch

from megatron_ext.config import ModelConfig
from megatron_ext.rope import angles, dynamic_base, model_frequencies, settled

FAR = torch.cat([torch.arange(17), 2 ** torch.arange(5, 21), 2**20 - torch.arange(1, 4000, 97)]).to(torch.int32)


def precisely(model: ModelConfig, row_length: int) -> list[Fraction]:
    """The frequencies by the formulas of the module's table, to 60 digits."""
    getcontext().prec = 60
    size = model.head_size
    base = Decimal(model.rotary_base)
    factor = Decimal(model.rope_scaling_factor)
    if model.rope_scaling == "dynamic":
        ratio = max(Decimal(row_length) / Decimal(model.rope_original_length or 0), Decimal(1))
        base *= (factor * ratio - (factor - 1)) ** (Decimal(size) / (size - 2))
    plain = [base ** (Decimal(-2 * k) / size) for k in range(size // 2)]
    if model.rope_scaling in ("none", "dynamic"):
        share = [Decimal(1)] * len(plain)
    elif model.rope_scaling == "linear":
        share = [Decimal(0)] * len(plain)
    else:
        length = Decimal(model.rope_original_length or 0)
        share = _yarn(model, length) if model.rope_scaling == "yarn" else _llama3(model, length, plain)
    return [Fraction(theta / factor * (1 - part) + theta * part) for theta, part in zip(plain, share, strict=True)]


def _yarn(model: ModelConfig, length: Decimal) -> list[Decimal]:
    size = model.head_size

    def pair(turns: float) -> Decimal:
        return size * (length / (Decimal(turns) * 2 * PI)).ln() / (2 * Decimal(model.rotary_base).ln())

    low = max(math.floor(pair(model.rope_beta_fast)), 0)
    high = min(math.ceil(pair(model.rope_beta_slow)), size - 1)
    return [1 - min(max(Decimal(k - low) / (high - low), Decimal(0)), Decimal(1)) for k in range(size // 2)]


def _llama3(model: ModelConfig, length: Decimal, plain: list[Decimal]) -> list[Decimal]:
    low, high = Decimal(model.rope_low_freq_factor), Decimal(model.rope_high_freq_factor)
    turns = [length * theta / (2 * PI) for theta in plain]
    return [min(max((turn - low) / (high - low), Decimal(0)), Decimal(1)) for turn in turns]


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


KINDS: dict[str, dict[str, float]] = {
    "none": {"rope_scaling_factor": 1.0},
    "linear": {},
    "dynamic": {"rope_original_length": 1024},
    "yarn": {"rope_original_length": 1024, "rope_beta_fast": 24.0, "rope_beta_slow": 2.0},
    "llama3": {"rope_original_length": 1024, "rope_low_freq_factor": 1.5, "rope_high_freq_factor": 5.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "base"), [(64, 1e4), (128, 5e5), (128, 8e6), (128, 1.28e8), (80, 1.53e7)])
def test_angles_are_right_at_a_million_tokens(kind: str, size: int, base: float) -> None:
    """The angles are compared with 60 digits; float32 products are 0.03 off here."""
    model = scaled(kind, size, base, **KINDS[kind])
    turned = angles(FAR, model_frequencies(model, 2**20))
    assert turned.dtype == torch.float32
    turn = 2 * Fraction(PI)
    frequencies = precisely(model, 2**20)
    wanted = [[float(p * theta % turn) for theta in frequencies] for p in FAR.tolist()]
    wanted_th = torch.tensor(wanted, dtype=torch.float64).repeat(1, 2)
    torch.testing.assert_close(turned.cos().double(), wanted_th.cos(), rtol=0, atol=5e-7)
    torch.testing.assert_close(turned.sin().double(), wanted_th.sin(), rtol=0, atol=5e-7)


def scaled(kind: str, size: int, base: float, **options: Any) -> ModelConfig:
    return ModelConfig(
        hidden_size=2 * size,
        num_attention_heads=2,
        rotary_base=base,
        rope_scaling=kind,  # type: ignore[arg-type]
        **{"rope_scaling_factor": 4.0} | options,
    )


def test_dynamic_scaling_ends_at_the_original_length() -> None:
    model = scaled("dynamic", 64, 1e4, rope_original_length=2048)
    assert dynamic_base(model, 100) == dynamic_base(model, 2048) == 1e4
    assert dynamic_base(model, 2049) > 1e4
    for length in (512, 4096):
        fixed = settled(model, length)
        assert fixed.rope_scaling == "none"
        torch.testing.assert_close(model_frequencies(fixed, 1), model_frequencies(model, length), rtol=0, atol=0)


def test_bases_by_window() -> None:
    model = ModelConfig(rotary_base=1e6, rope_window_bases=("8192:500000", "1024:1e4"))
    bases = [model.rotary_base_at(window) for window in (1, 1024, 1025, 8192, 8193)]
    assert bases == [1e4, 1e4, 5e5, 5e5, 1e6]
    assert ModelConfig(rotary_base=7.0).rotary_base_at(5) == 7.0
    assert settled(model, 10).rotary_base_at(5) == 1e6
