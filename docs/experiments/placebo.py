"""Train as pretrain_skyladder.py does, with the weights of each row permuted among its scored tokens.

The weights have the same distribution and no information about the tokens: the placebo of token_weighting.md. The
permutation depends on the row's seed alone, so an interrupted run continues exactly.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.token_weighting import weigher
from pretrain_skyladder import main

weigh_rows = weigher.weigh_rows


def permuted(
    losses: dict[str, Tensor], trained_RL: Tensor, same_RL: Tensor | None, *, seeds: Sequence[int], **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `weigh_rows` returns, with weights [R, L] exchanged among the tokens that have a score."""
    weights_RL, scores_RL, bad_RL = weigh_rows(losses, trained_RL, same_RL, seeds=seeds, **options)
    scored_RL = trained_RL if same_RL is None else trained_RL & ~same_RL
    for weights_L, scored_L, seed in zip(weights_RL, scored_RL, seeds, strict=True):
        at = scored_L.nonzero().squeeze(1)
        order = torch.randperm(len(at), generator=torch.Generator().manual_seed(seed % 2**63))
        weights_L[at] = weights_L[at[order.to(at.device)]]
    return weights_RL, scores_RL, bad_RL


if __name__ == "__main__":
    weigher.weigh_rows = permuted
    sys.exit(main(sys.argv[1:]))
