"""From the scores of a row to its weights, with M the row's trained tokens; the others weigh 0.

    dense    w = strength + (1 - strength) * M * |s| / sum |s|
    sparse   the k = floor(strength * M) highest scores, at least 1, weigh M / k, the rest 0
    none     w = s

A row whose scores are all 0 gets 1 for each trained token. Sums are taken row by row, so that the weights of a row
are the same bits whatever rows stand beside it.

Legend: R rows, L tokens of a row.
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
    """Lists the ways to make weights of scores, by the names that `--weight-post` takes."""

    DENSE = "dense"
    SPARSE = "sparse"
    NONE = "none"


@dataclass(frozen=True)
class ScoredRows:
    """Holds scores, and what the host knows of each row.

    Attributes:
        scores_RL: float64 [R, L], finite, 0 where not trained.
        trained_RL: bool [R, L].
        counts: M of each row, its trained tokens.
        scored: of these, those with a score other than 0.
    """

    scores_RL: Tensor
    trained_RL: Tensor
    counts: Sequence[int]
    scored: Sequence[int]


def postprocess(post: Post, rows: ScoredRows, strength: float, seeds: Sequence[int]) -> Tensor:
    """Turn scores into weights; `strength` is the paper's lambda for dense, its kappa for sparse, unread by none.

    Returns:
        float64 [R, L].
    """
    if post is Post.SPARSE:
        return _sparse(rows, strength, seeds)
    weights_RL = rows.trained_RL.double()
    for row, (count, scored) in enumerate(zip(rows.counts, rows.scored, strict=True)):
        if scored:
            scores_L = rows.scores_RL[row]
            if post is Post.DENSE:
                size_L = scores_L.abs()
                scores_L = strength + (1 - strength) * count * (size_L / size_L.sum())
            weights_RL[row] *= scores_L
    return weights_RL


def _sparse(rows: ScoredRows, strength: float, seeds: Sequence[int]) -> Tensor:
    """Keep the k = floor(strength * M) highest scores, at least 1; ties for the last places are drawn.

    scores    3 0 0 1 0        strength 0.6, M = 5: k = 3
    weights   w 0 w w 0        w = 5/3; the seed drew one of three zeros
    """
    # 0.29 of 100 is 29, though the nearest double to 0.29 lies below it
    kept = [
        max(math.floor(strength * count * (1 + 1e-12)), 1) if scored else count
        for count, scored in zip(rows.counts, rows.scored, strict=True)
    ]
    kept_R = torch.tensor(kept).to(rows.scores_RL.device)
    ranked_RL = rows.scores_RL.masked_fill(~rows.trained_RL, -torch.inf)
    last_R1 = ranked_RL.sort(dim=1, descending=True).values.gather(1, kept_R.clamp(min=1)[:, None] - 1)
    chosen_RL = ranked_RL > last_R1
    tied_RL = ranked_RL == last_R1
    places_R = kept_R - chosen_RL.sum(dim=1)
    ties = torch.stack([places_R, tied_RL.sum(dim=1)], dim=1).tolist()  # the device is asked once, for all rows
    for row, ((places, tied), seed) in enumerate(zip(ties, seeds, strict=True)):
        chosen_RL[row] |= _drawn(tied_RL[row], places, seed) if tied > places else tied_RL[row]
    each = [count / max(k, 1) for count, k in zip(rows.counts, kept, strict=True)]
    return chosen_RL * torch.tensor(each, dtype=torch.float64).to(chosen_RL.device)[:, None]


def _drawn(among_L: Tensor, places: int, seed: int) -> Tensor:
    """Draw `places` of the tokens in `among_L`, bool [L]: those with the lowest words of the seed's stream.

    A token's word depends on (seed, position) alone. Philox's raw words are fixed by its definition, on every device.
    """
    words = np.random.Philox(key=np.array([seed, PURPOSE], dtype=np.uint64)).random_raw(len(among_L))
    words_L = torch.from_numpy((words >> np.uint64(1)).astype(np.int64)).to(among_L.device)
    # a sort, not a sample: what a token's neighbours are changes neither its word nor the order of the others
    order = words_L.masked_fill(~among_L, torch.iinfo(torch.int64).max).sort(stable=True).indices
    drawn_L = torch.zeros_like(among_L)
    drawn_L[order[:places]] = True
    return drawn_L
