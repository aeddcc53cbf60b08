"""Choose the next token, greedily or by sampling: a pure function of (seed, number of the text, position)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Options of sampling; without temperature, top_k and top_p the likeliest token is taken.

    Raises:
        UserError: a number out of range.
    """

    temperature: float | None = None  # divides the logits; None for 1
    top_k: int | None = None  # sample among this many likeliest tokens; None for all
    top_p: float | None = None  # among the likeliest that together have this probability, at least one; None for all
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise UserError(f"temperature: got {self.temperature:g}, needs a number above 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p: got {self.top_p:g}, needs 0 < p <= 1")

    def draws(self, text: int) -> np.random.Generator:
        """Return the random numbers of a text, one per token, independent of the other texts in its batch."""
        return np.random.default_rng([self.seed, text])


def choose(logits_nV: Tensor, sampling: Sampling, draws: list[np.random.Generator]) -> Tensor:
    """Choose the next token of n texts, with the next of each text's `draws` unless greedy; return int64 [n]."""
    if sampling.temperature is None and sampling.top_k is None and sampling.top_p is None:
        return logits_nV.argmax(dim=-1)
    probability_nV, token_nV = probabilities(logits_nV, sampling)
    cumulated_nV = probability_nV.cumsum(dim=-1)
    drawn_n1 = torch.tensor([[draw.random()] for draw in draws], dtype=torch.float64, device=logits_nV.device)
    # right: a draw of exactly 0 must not select a token of probability 0
    place_n1 = torch.searchsorted(cumulated_nV, drawn_n1 * cumulated_nV[:, -1:], right=True)
    return token_nV.gather(1, place_n1)[:, 0]


def probabilities(logits_nV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the probability of sampling each token, float64 [n, V], and the tokens [n, V], the likeliest first."""
    all_nV = (logits_nV.double() / (sampling.temperature or 1.0)).softmax(dim=-1)
    falling_nV, token_nV = all_nV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        falling_nV[:, sampling.top_k :] = 0
        falling_nV /= falling_nV.sum(dim=-1, keepdim=True)
    if sampling.top_p is not None:
        likelier_nV = falling_nV.cumsum(dim=-1) - falling_nV
        falling_nV = falling_nV.masked_fill(likelier_nV >= sampling.top_p, 0)
        falling_nV /= falling_nV.sum(dim=-1, keepdim=True)
    return falling_nV, token_nV
