"""Turn the scores of a row into weights, by the equations in weigh.py.

Sums are computed row by row, so that the weights of a row do not depend on the other rows in the batch, bit for bit.
There is no host synchronization.

Legend: R rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from megatron_ext.device import moved

PURPOSE = int.from_bytes(b"weights", "big")  # separates this random stream from others


class Post(StrEnum):
    """The ways to turn scores into weights; values of `--weight-post`."""

    DENSE = "dense"
    SPARSE = "sparse"
    NONE = "none"


def postprocess(post: Post, scores_RL: Tensor, trained_RL: Tensor, strength: float, seeds: Sequence[int]) -> Tensor:
    """Turn scores into weights.

    Args:
        post: how.
        scores_RL: float64, 0 for untrained tokens.
        trained_RL: bool.
        strength: the paper's lambda for dense, its kappa for sparse, and unused by none.
        seeds: one per row, for sparse.

    Returns:
        float64 [R, L].
    """
    counts_R, scored_R = trained_RL.sum(dim=1).double(), (scores_RL != 0).any(dim=1)
    if post is Post.SPARSE:
        return _sparse(scores_RL, trained_RL, counts_R, scored_R, strength, seeds)
    weights = []
    for scores_L, count, scored, uniform_L in zip(scores_RL, counts_R, scored_R, trained_RL.double(), strict=True):
        if post is Post.DENSE:
            size_L = scores_L.abs()
            scores_L = strength + (1 - strength) * count * (size_L / size_L.sum())
        weights.append(torch.where(scored, uniform_L * scores_L, uniform_L))
    return torch.stack(weights)


def _sparse(
    scores_RL: Tensor, trained_RL: Tensor, counts_R: Tensor, scored_R: Tensor, strength: float, seeds: Sequence[int]
) -> Tensor:
    """Keep the k = floor(strength * M) highest scores, at least 1; ties for the last places are drawn.

    scores    3 0 0 1 0        strength 0.6, M = 5: k = 3
    weights   w 0 w w 0        w = 5/3; the seed drew one of three zeros
    """
    # 0.29 * 100 is 29, though the nearest double to 0.29 is below it
    share_R = (strength * counts_R * (1 + 1e-12)).floor().clamp(min=1)
    kept_R = torch.where(scored_R, share_R, counts_R).long()
    ranked_RL = scores_RL.masked_fill(~trained_RL, -torch.inf)
    last_R1 = ranked_RL.sort(dim=1, descending=True).values.gather(1, kept_R.clamp(min=1)[:, None] - 1)
    chosen_RL = ranked_RL > last_R1
    tied_RL = ranked_RL == last_R1
    places_R = kept_R - chosen_RL.sum(dim=1)
    drawn = [_drawn(*row) for row in zip(tied_RL, places_R, seeds, strict=True)]
    each_R = counts_R / kept_R.clamp(min=1)
    return (chosen_RL | torch.stack(drawn)) * each_R[:, None]


def _drawn(among_L: Tensor, places: Tensor, seed: int) -> Tensor:
    """Draw `places` (a count, at most all) of the tokens in `among_L`, bool [L]: those with the seed's lowest words.

    A token's word depends only on (seed, position). Philox's raw words are fixed by its definition, on every device.
    """
    words = np.random.Philox(key=np.array([seed, PURPOSE], dtype=np.uint64)).random_raw(len(among_L))
    words_L = moved(torch.from_numpy((words >> np.uint64(1)).astype(np.int64)), among_L.device)
    # a sort, not a sample: neighbors of a token change neither its word nor the order of the others
    order = words_L.masked_fill(~among_L, torch.iinfo(torch.int64).max).sort(stable=True).indices
    first_L = torch.arange(len(order), device=order.device) < places
    return torch.zeros_like(among_L).scatter(0, order, first_L)
