"""From the scores of a row to its weights. N counts the row's trained tokens; the others weigh 0.

    dense    w = lambda + (1 - lambda) * N * |s| / sum |s|
    sparse   the k = floor(kappa * N) highest scores, at least 1, weigh N / k, the rest 0
    none     w = s

A row whose scores are all 0 gets 1 for each trained token. Sums are taken row by row, so that the weights of a row
are the same bits whatever rows stand beside it.

Legend: R rows, N tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

PURPOSE = int.from_bytes(b"weights", "big")  # no other draw keys Philox with (seed, this)


class Post(StrEnum):
    """What makes weights of scores, by name."""

    DENSE = "dense"
    SPARSE = "sparse"
    NONE = "none"


@dataclass(frozen=True)
class ScoredRows:
    """Scores, and what the host knows of each row.

    Attributes:
        scores_RN: float64 [R, N], finite, 0 where not trained.
        trained_RN: bool [R, N].
        counts: of each row, its trained tokens.
        scored: of these, those with a score other than 0.
    """

    scores_RN: Tensor
    trained_RN: Tensor
    counts: Sequence[int]
    scored: Sequence[int]


def postprocess(post: Post, rows: ScoredRows, strength: float, seeds: Sequence[int]) -> Tensor:
    """float64 [R, N], the weights; `strength` is the lambda of dense, the kappa of sparse, unread by none."""
    if post is Post.SPARSE:
        return _sparse(rows, strength, seeds)
    weights_RN = rows.trained_RN.double()
    for row, (count, scored) in enumerate(zip(rows.counts, rows.scored, strict=True)):
        if scored:
            scores_N = rows.scores_RN[row]
            weights_RN[row] *= scores_N if post is Post.NONE else _dense(scores_N, count, strength)
    return weights_RN


def _dense(scores_N: Tensor, count: int, uniform: float) -> Tensor:
    size_N = scores_N.abs()
    return uniform + (1 - uniform) * count * (size_N / size_N.sum())


def _sparse(rows: ScoredRows, share: float, seeds: Sequence[int]) -> Tensor:
    """The k = floor(share * N) highest scores, at least 1; ties for the last places are drawn.

    scores    3 0 0 1 0        share 0.6, N = 5: k = 3
    weights   w 0 w w 0        w = 5/3; the seed drew one of three zeros
    """
    facts = zip(rows.counts, rows.scored, strict=True)
    kept = [_kept(share, count) if scored else count for count, scored in facts]
    kept_R = torch.tensor(kept).to(rows.scores_RN.device)
    ranked_RN = rows.scores_RN.masked_fill(~rows.trained_RN, -torch.inf)
    last_R1 = ranked_RN.sort(dim=1, descending=True).values.gather(1, kept_R.clamp(min=1)[:, None] - 1)
    chosen_RN = ranked_RN > last_R1
    tied_RN = ranked_RN == last_R1
    places_R = kept_R - chosen_RN.sum(dim=1)
    ties = torch.stack([places_R, tied_RN.sum(dim=1)], dim=1).tolist()
    for row, ((places, tied), seed) in enumerate(zip(ties, seeds, strict=True)):
        chosen_RN[row] |= _drawn(tied_RN[row], places, seed) if tied > places else tied_RN[row]
    each = [count / max(k, 1) for count, k in zip(rows.counts, kept, strict=True)]
    return chosen_RN * torch.tensor(each, dtype=torch.float64).to(chosen_RN.device)[:, None]


def _kept(share: float, count: int) -> int:
    """floor(share * count), at least 1; 0.29 of 100 is 29, though the nearest double to 0.29 lies below it."""
    return max(math.floor(share * count * (1 + 1e-12)), 1)


def _drawn(among_N: Tensor, places: int, seed: int) -> Tensor:
    """bool [N]: `places` of the tokens in `among_N`, those with the lowest words of the seed's stream.

    A token's word depends on (seed, position) alone. Philox's raw words are fixed by its definition, on every device.
    """
    words = np.random.Philox(key=np.array([seed, PURPOSE], dtype=np.uint64)).random_raw(len(among_N))
    words_N = torch.from_numpy((words >> np.uint64(1)).astype(np.int64)).to(among_N.device)
    order = words_N.masked_fill(~among_N, torch.iinfo(torch.int64).max).sort(stable=True).indices
    drawn_N = torch.zeros_like(among_N)
    drawn_N[order[:places]] = True
    return drawn_N
