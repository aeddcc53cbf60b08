"""Compute token weights from losses.

With PMI = short_loss - long_loss, s the score of a token and M the trained tokens of its row:

    score                                     post                   strength
    abs      |PMI|                            dense, sparse, none    lambda, kappa, not read
    ppmi     max(PMI - ln k, 0), k = shift    dense, sparse, none    lambda, kappa, not read
    npmi     max(-PMI - ln k, 0)              dense, sparse, none    lambda, kappa, not read
    longce   min(exp(PMI), gamma)             none                   not read; gamma = clip, 5 if None
    rho1     long_loss - short_loss           sparse                 kappa
    focal    (1 - exp(-long_loss))^gamma      dense, sparse, none    lambda, kappa (gamma is 1), gamma
    mile     (1 + entropy)^gamma              dense, sparse, none    lambda, kappa (gamma is 1), gamma

    dense    w = lambda + (1 - lambda) * M * |s| / sum |s|           0 <= lambda <= 1, the paper's 0.75
    sparse   the k = kappa * M highest s weigh M / k, the rest 0     0 < kappa <= 1, k rounded down, >= 1
    none     w = s                                                   0 <= gamma

Lambda, kappa and gamma are the papers' names of the option `strength`, whose meaning depends on the post.
Dense and sparse rows sum to M (before `clip`); lambda = 1 and kappa = 1 are uniform. A row whose scores are all 0
is uniform, 1 for each trained token, under every post; a row without trained tokens is all 0.

rho1's short_loss is the reference model's loss: tokens with the highest *excess* loss, where the trained model is
worst compared with the reference, are kept. The normalized losses of MiLe's authors, gamma 1, are dense with lambda 0.

Legend: R rows, L tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from megatron_ext.errors import UserError, echo
from megatron_ext.token_weighting.postprocess import Post, postprocess
from megatron_ext.token_weighting.scores import LONGCE_GAMMA, Score, score_tokens

Given = Tensor | ArrayLike
Array = TypeVar("Array", Tensor, np.ndarray)

POSTS = {score: tuple(Post) for score in Score} | {Score.LONGCE: (Post.NONE,), Score.RHO1: (Post.SPARSE,)}


def weigh(
    long_loss: Array,
    short_loss: Given | None,
    *,
    score: str | Score = "abs",
    post: str | Post = "dense",
    strength: float = 0.75,
    trained: Given | None = None,
    same_context: Given | None = None,
    clip: float | None = None,
    shift: float | None = None,
    entropy: Given | None = None,
    seed: int | Sequence[int] = 0,
) -> Array:
    """Compute the weights w of loss = -(1/M) sum_i w_i log p(y_i | y_<i); no gradient flows through them.

    Args:
        long_loss: float [R, L], -log p(label) in the long context: a tensor on any device, or array-like.
        short_loss: float [R, L], in the short context or of the reference model; not used by focal and mile.
        score, post, strength: see the module's table.
        trained: bool [R, L], default all. Other tokens have weight 0 and are ignored, whatever their losses.
        same_context: bool [R, L]: short and long context coincide, so PMI is exactly 0 whatever the losses (and
            the weight of longce exactly 1). Not for focal and mile.
        clip: upper bound of the weights, > 0, applied last and without normalizing again; longce's gamma.
        shift: k >= 1, for ppmi and npmi.
        entropy: float [R, L] in nats, of the predicted distribution, for mile.
        seed: 0 .. 2^64-1, for all rows or one per row. It only breaks ties for the last places of `sparse`, by
            position, so that no row depends on its neighbors.

    Returns:
        float32 [R, L]: a tensor on long_loss's device, or a numpy array if long_loss is not a tensor.

    Raises:
        ValueError: an option out of range or of another score; a shape or dtype that does not fit; a trained token's
            score that is not finite.
    """
    weights_RL, _ = weigh_and_score(
        long_loss,
        short_loss,
        score=score,
        post=post,
        strength=strength,
        trained=trained,
        same_context=same_context,
        clip=clip,
        shift=shift,
        entropy=entropy,
        seed=seed,
    )
    return weights_RL if isinstance(long_loss, Tensor) else weights_RL.numpy()


@torch.no_grad()
def weigh_and_score(
    long_loss: Given,
    short_loss: Given | None,
    *,
    score: str | Score,
    post: str | Post,
    strength: float,
    trained: Given | None = None,
    same_context: Given | None = None,
    clip: float | None = None,
    shift: float | None = None,
    entropy: Given | None = None,
    seed: int | Sequence[int] = 0,
    checked: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the weights as `weigh` does, and the scores from which they were computed.

    With `checked` False nothing is read on the host; if the score of a trained token is not finite, all weights are NaN
    instead of an error.

    Returns:
        weights, float32 [R, L], and scores, float64 [R, L], 0 for untrained tokens.
    """
    score, post = Score(score), Post(post)
    _check(score, post, strength, clip, shift)
    given = {"long_loss": long_loss, "short_loss": short_loss, "entropy": entropy}
    for name, value, is_read in (
        *((name, given[name], True) for name in score.reads),
        ("entropy", entropy, "entropy" in score.reads),
        ("same_context", same_context, "short_loss" in score.reads),
    ):
        if value is None and is_read and name != "same_context":
            raise UserError(f"{name}: got None, score {score.value} needs it, [rows, tokens]")
        if value is not None and not is_read:
            raise UserError(f"{name}: score {score.value} does not read it; leave it out")
    long_RL = _tensor(long_loss)
    if long_RL.ndim != 2 or not long_RL.numel():
        raise UserError(f"long_loss: got shape {list(long_RL.shape)}, needs [rows, tokens], at least one of each")
    losses = {name: _fit(name, given[name], long_RL).double() for name in score.reads}
    trained_RL = _mask("trained", trained, long_RL, default=True)
    same_RL = _mask("same_context", same_context, long_RL, default=False)
    first_RL, *second = losses.values()
    pmi_RL = (second[0] - first_RL if second else first_RL).masked_fill(~trained_RL | same_RL, 0.0)
    gamma = strength if post is Post.NONE else 1  # dense and sparse use strength for themselves
    k, bound = 1 if shift is None else shift, LONGCE_GAMMA if clip is None else clip
    # one row at a time: torch rounds the end of an array differently, and a row must not depend on the batch
    rows = [score_tokens(score, row_L, shift=k, strength=gamma, bound=bound) for row_L in pmi_RL]
    scores_RL = torch.stack(rows).masked_fill(~trained_RL, 0.0)
    bad_RL = ~(pmi_RL.isfinite() & scores_RL.float().isfinite())
    if checked and bad_RL.any():
        row, position = bad_RL.nonzero()[0].tolist()
        got = ", ".join(f"{name} {values_RL[row, position].item():g}" for name, values_RL in losses.items())
        raise ValueError(
            f"score {score.value}: row {row}, position {position} got {got}, needs finite values and a finite "
            "score; find where they diverge, or leave the token out of trained"
        )
    weights_RL = postprocess(post, scores_RL, trained_RL, strength, _seeds(seed, len(rows)))
    weights_RL = weights_RL.masked_fill(bad_RL.any(), torch.nan)
    return (weights_RL if clip is None else weights_RL.clamp(max=clip)).float(), scores_RL


def _tensor(values: Given | None) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def _fit(name: str, values: Given | None, long_RL: Tensor) -> Tensor:
    tensor = _tensor(values)
    if tensor.shape != long_RL.shape:
        raise UserError(f"{name}: got shape {list(tensor.shape)}, needs long_loss's {list(long_RL.shape)}")
    return tensor.to(long_RL.device)


def _mask(name: str, given: Given | None, long_RL: Tensor, *, default: bool) -> Tensor:
    if given is None:
        return torch.full_like(long_RL, default, dtype=torch.bool)
    mask = _fit(name, given, long_RL)
    if mask.dtype != torch.bool:
        raise UserError(f"{name}: got {mask.dtype}, needs bool; compare it with 0 first")
    return mask


def _seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """Return a seed for each row, from a single seed or one per row."""
    seeds = [int(each) for each in ([seed] * rows if isinstance(seed, (int, np.integer)) else seed)]
    if len(seeds) != rows or not all(0 <= each < 2**64 for each in seeds):
        raise UserError(f"seed: got {echo(seed)}, needs 0 <= seed < 2^64, one for all or one for each of {rows} rows")
    return seeds


def _check(score: Score, post: Post, strength: float, clip: float | None, shift: float | None) -> None:
    has_gamma = post is Post.NONE and score in (Score.FOCAL, Score.MILE)
    legal = ", ".join(each.value for each in POSTS[score])
    for holds, message in (
        (post in POSTS[score], f"post: got {post.value}, score {score.value} needs one of {legal}"),
        (post is not Post.DENSE or 0 <= strength <= 1, f"strength: got {strength}, post dense needs 0 <= lambda <= 1"),
        (post is not Post.SPARSE or 0 < strength <= 1, f"strength: got {strength}, post sparse needs 0 < kappa <= 1"),
        (not has_gamma or 0 <= strength < math.inf, f"strength: got {strength}, score {score.value} needs gamma >= 0"),
        (clip is None or 0 < clip < math.inf, f"clip: got {clip}, needs a finite number > 0, or None for no bound"),
        (shift is None or score in (Score.PPMI, Score.NPMI), f"shift: got {shift}, only ppmi and npmi have one"),
        (shift is None or 1 <= shift < math.inf, f"shift: got {shift}, needs a finite k >= 1"),
    ):
        if not holds:
            raise UserError(message)
