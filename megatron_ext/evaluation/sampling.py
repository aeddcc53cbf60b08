"""Choose the next token, greedily or by sampling: a pure function of (seed, number of the text, position)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Attributes:
        temperature: divides the logits; None for greedy.
        top_k: sample among this many likeliest tokens; None for all.
        top_p: sample among the likeliest tokens that together have this probability, at least one; None for all.
        seed: of the random numbers.

    Raises:
        UserError: a number out of range, or top_k or top_p without temperature.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature is None:
            for name in ("top_k", "top_p"):
                if (value := getattr(self, name)) is not None:
                    raise UserError(f"{name}: got {value} without temperature, needs both; add --temperature 1")
        for name, fits, needs in (
            ("temperature", self.temperature is None or 0 < self.temperature < math.inf, "a number above 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "0 < p <= 1"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not fits:
                raise UserError(f"{name}: got {getattr(self, name):g}, needs {needs}")

    def draws(self, text: int) -> np.random.Generator:
        """Return the random numbers of a text, one per token, independent of the other texts in its batch."""
        return np.random.default_rng([self.seed, text])


def choose(logits_nV: Tensor, sampling: Sampling, draws: list[np.random.Generator]) -> Tensor:
    """Choose the next token of n texts; return int64 [n].

    Args:
        logits_nV: float32.
        sampling: the options.
        draws: of each text; one number of each is used unless greedy.
    """
    if sampling.temperature is None:
        return logits_nV.argmax(dim=-1)
    cumulated_nV = probabilities(logits_nV, sampling).cumsum(dim=-1)
    drawn_n1 = torch.tensor([[draw.random()] for draw in draws], dtype=torch.float64, device=logits_nV.device)
    # right: a draw of exactly 0 must not select a token of probability 0
    return torch.searchsorted(cumulated_nV, drawn_n1 * cumulated_nV[:, -1:], right=True)[:, 0]


def probabilities(logits_nV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probability of sampling each token; float64 [n, V]."""
    assert sampling.temperature is not None
    logits_nV = logits_nV.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_nV.shape[1]:
        least_n1 = logits_nV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_nV = logits_nV.masked_fill(logits_nV < least_n1, float("-inf"))
    if sampling.top_p is not None:
        falling_nV, order_nV = logits_nV.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        left_out_nV = falling_nV.cumsum(dim=-1) - falling_nV >= sampling.top_p  # already enough
        left_out_nV[:, 0] = False
        left_out_nV = left_out_nV.gather(1, order_nV.argsort(dim=-1))  # back in the vocabulary's order
        logits_nV = logits_nV.masked_fill(left_out_nV, float("-inf"))
    return logits_nV.softmax(dim=-1)
