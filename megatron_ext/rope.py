"""Compute rotary angles (RoPE) for given positions, with context extension.

theta_k = base ** (-2k / d) for k = 0 .. d/2 - 1, where d is the head size, or the rotated part of it; a token at
position p rotates pair k by p theta_k. Frequencies and products are float64, and angles are reduced modulo 2 pi before
they become float32: at position 2^19 a float32 product, as transformers computes it, has an error of up to 1/32, and so
have the cosines. With f the scaling factor, L0 the original length and L the row's:

    linear   theta_k / f                                                           (arXiv 2306.15595)
    dynamic  base * (f L / L0 - (f - 1)) ** (d / (d - 2)) for L > L0: NTK
    yarn     between theta_k / f and theta_k by the number of rotations in L0;
             queries and keys times 0.1 ln f + 1, with MLA (0.1 ln f + 1) / (0.1 m ln f + 1),
             and then all scores times (0.1 m ln f + 1)^2                          (arXiv 2309.00071)
    llama3   between theta_k / f and theta_k by the wavelength 2 pi / theta_k      (Llama 3.1)

Frequencies and the attention factor equal those that transformers computes from the same configuration.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.device import moved


def inverse_frequencies(head_size: int, base: float) -> Tensor:
    """Compute theta_k = base ** (-2k / head_size) for k = 0, 1, ...; float64 [head_size / 2]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    return 1.0 / base**exponents


def angles(positions_t: Tensor, inverse_frequencies_h: Tensor) -> Tensor:
    """Compute angles in the half-split layout: dimensions k and k + head_size/2 share an angle.

    Takes positions, int [t], and frequencies, float64 [head_size / 2]. Returns float32 [t, head_size]: position *
    frequency modulo 2 pi, in -pi .. pi, repeated twice.
    """
    angles_th = positions_t.to(torch.float64)[:, None] * inverse_frequencies_h[None]
    # reduced modulo 2 pi in float64, because float32 has too few digits
    angles_th -= (angles_th / (2 * math.pi)).round_() * (2 * math.pi)
    reduced_th = angles_th.to(torch.float32)
    return torch.cat((reduced_th, reduced_th), dim=-1)


def model_frequencies(model: ModelConfig, row_length: int, base: float | None = None) -> Tensor:
    """Compute the model's scaled frequencies; float64 [rotary_size / 2].

    Dynamic scaling extends up to the row's length. `base` overrides `rotary_base` if the base follows the window.
    """
    if model.rope_scaling == "dynamic":
        base = dynamic_base(model, row_length)
    if base is None:
        base = model.rotary_base
    plain = inverse_frequencies(model.rotary_size, base)
    if model.rope_scaling == "linear":
        return plain / model.rope_scaling_factor
    if model.rope_scaling == "yarn":
        return _between(plain, _kept_by_yarn(model), model.rope_scaling_factor)
    if model.rope_scaling == "llama3":
        # fraction kept: 1 for wavelengths below L0 / high_freq_factor, 0 above L0 / low_freq_factor, linear in between
        assert model.rope_original_length is not None  # config/checks.py
        turns = model.rope_original_length * plain / (2 * math.pi)
        low = model.rope_low_freq_factor
        high = model.rope_high_freq_factor
        return _between(plain, ((turns - low) / (high - low)).clamp(0, 1), model.rope_scaling_factor)
    return plain


class Frequencies:
    """Caches a model's frequencies for each base and device; `row_length` as for `model_frequencies`."""

    def __init__(self, model: ModelConfig, row_length: int) -> None:
        self.model = model
        self.row_length = row_length
        self._by_key: dict[tuple[float | None, torch.device, bool], Tensor] = {}

    def at(self, base: float | None, device: torch.device, *, local: bool = False) -> Tensor:
        """Return the frequencies, float64 [rotary_size / 2] on `device`; a base of None is the model's.

        `local` returns the frequencies of local layers with a separate base, which are not scaled.
        """
        key = base, device, local
        if key not in self._by_key:
            if local:
                assert self.model.rotary_base_local is not None
                frequencies = inverse_frequencies(self.model.rotary_size, self.model.rotary_base_local)
            else:
                frequencies = model_frequencies(self.model, self.row_length, base)
            self._by_key[key] = moved(frequencies, device)
        return self._by_key[key]


def dynamic_base(model: ModelConfig, length: int) -> float:
    """Return the base of dynamic NTK scaling for rows of `length` tokens: `rotary_base` up to the original length.

    base * r ** (d / (d - 2)): the lowest frequency falls by r and the highest is unchanged (arXiv 2410.02660).
    """
    assert model.rope_original_length is not None  # config/checks.py
    factor = model.rope_scaling_factor
    ratio = max(length / model.rope_original_length, 1.0)
    size = model.rotary_size
    return model.rotary_base * (factor * ratio - (factor - 1)) ** (size / (size - 2))


def attention_factor(model: ModelConfig) -> float:
    """Return the factor by which rotated queries and keys are each multiplied; 1 without YaRN."""
    if model.rope_scaling != "yarn":
        return 1.0
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    factor = model.rope_scaling_factor
    return mscale(factor, 1.0) / mscale(factor, model.rope_mscale_all_dim)


def score_factor(model: ModelConfig) -> float:
    """Return the factor of the scores of all dimensions, rotated or not (DeepSeek's YaRN); 1 for other models."""
    return mscale(model.rope_scaling_factor, model.rope_mscale_all_dim) ** 2


def mscale(factor: float, weight: float) -> float:
    """Return 0.1 * weight * ln factor + 1, YaRN's factor for a scaling factor of at least 1."""
    return 0.1 * weight * math.log(factor) + 1.0


def settled(model: ModelConfig, length: int) -> ModelConfig:
    """Return the model with a fixed base for `length` tokens: `rotary_base` if windows have other bases."""
    if model.rope_scaling == "dynamic":
        base = dynamic_base(model, length)
        model = replace(
            model, rope_scaling="none", rotary_base=base, rope_scaling_factor=1.0, rope_original_length=None
        )
    return replace(model, rope_window_bases=())


def follows_text(model: ModelConfig, row_length: int) -> bool:
    """Return whether the angles of a model trained on rows of `row_length` depend on the length of each text.

    They do for `dynamic` up to the original length; with longer rows, every text uses the base of the row length.
    """
    return model.rope_scaling == "dynamic" and row_length <= (model.rope_original_length or 0)


def _between(plain_h: Tensor, kept_h: Tensor, factor: float) -> Tensor:
    """Interpolate each frequency between itself, with weight `kept_h`, and its quotient by `factor`."""
    return plain_h / factor * (1 - kept_h) + plain_h * kept_h


def _kept_by_yarn(model: ModelConfig) -> Tensor:
    """Return the fraction kept: 1 above beta_fast rotations in the original length, 0 below beta_slow.

    Between them it is a linear ramp over k. Pairs with many rotations distinguish nearby tokens and are unchanged;
    pairs without a full rotation are stretched.
    """
    assert model.rope_original_length is not None  # config/checks.py
    size = model.rotary_size
    length = model.rope_original_length

    def pair_with(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))

    low = pair_with(model.rope_beta_fast)
    high = pair_with(model.rope_beta_slow)
    if model.rope_truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float64)
    return 1 - ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
