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

Dense and sparse rows sum to M (before `clip`); lambda = 1 and kappa = 1 are uniform. A row whose scores are all 0
is uniform, 1 for each trained token, under every post; a row without trained tokens is all 0.

rho1's short_loss is the reference model's loss: tokens with the highest *excess* loss, where the trained model is
worst compared with the reference, are kept. The normalized losses of MiLe's authors, gamma 1, are dense with lambda 0.

abs is of arXiv 2503.09202, longce 2410.23771, rho1 2404.07965, focal 1708.02002, mile 2310.19531; under ppmi the long
context helps, under npmi it harms.

Everything is computed in float64 and one row at a time, so that the weights of a row do not depend on the other rows in
the batch, bit for bit.

Legend: R rows, L tokens of a row.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from megatron_ext.device import moved
from megatron_ext.errors import UserError, echo

Values = Tensor | ArrayLike
Array = TypeVar("Array", Tensor, np.ndarray)

LONGCE_GAMMA = 5.0  # the default of the LongCE authors' code
PURPOSE = int.from_bytes(b"weights", "big")  # separates this random stream from others
POSTS: dict[str, tuple[str, ...]] = {  # by score
    **dict.fromkeys(("abs", "ppmi", "npmi", "focal", "mile"), ("dense", "sparse", "none")),
    "longce": ("none",),
    "rho1": ("sparse",),
}


def reads(score: str) -> tuple[str, ...]:
    """Return the arguments of `weigh` that a score is computed from."""
    return {"focal": ("long_loss",), "mile": ("entropy",)}.get(score, ("long_loss", "short_loss"))


def weigh(
    long_loss: Array,
    short_loss: Values | None,
    *,
    score: str = "abs",
    post: str = "dense",
    strength: float = 0.75,
    trained: Values | None = None,
    same_context: Values | None = None,
    clip: float | None = None,
    shift: float | None = None,
    entropy: Values | None = None,
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
    _check(score, post, strength, clip, shift)
    long_RL = _tensor(long_loss)
    if long_RL.ndim != 2 or not long_RL.numel():
        raise UserError(f"long_loss: got shape {list(long_RL.shape)}, needs [rows, tokens], at least one of each")
    for name, values, read_with in (("entropy", entropy, "entropy"), ("same_context", same_context, "short_loss")):
        if values is not None and read_with not in reads(score):
            raise UserError(f"{name}: score {score} does not read it; leave it out")
    inputs = {"long_loss": long_RL, "short_loss": short_loss, "entropy": entropy}
    losses = {name: _fit(name, inputs[name], long_RL) for name in reads(score)}
    if trained is None:
        trained = torch.ones_like(long_RL, dtype=torch.bool)
    trained_RL = _fit("trained", trained, long_RL, is_mask=True)
    same_RL = None
    if same_context is not None:
        same_RL = _fit("same_context", same_context, long_RL, is_mask=True)
    seeds = [seed] * len(long_RL) if isinstance(seed, (int, np.integer)) else seed
    if len(seeds) != len(long_RL) or not all(0 <= row_seed < 2**64 for row_seed in seeds):
        raise UserError(f"seed: got {echo(seed)}, needs 0 <= seed < 2^64, one for all or one for each row")
    weights_RL, _, bad_RL = weigh_rows(
        losses, trained_RL, same_RL, score=score, post=post, strength=strength, clip=clip, shift=shift, seeds=seeds
    )
    if bad_RL.any():
        row, position = bad_RL.nonzero()[0].tolist()
        got = ", ".join(f"{name} {values_RL[row, position].item():g}" for name, values_RL in losses.items())
        raise ValueError(
            f"score {score}: row {row}, position {position} got {got}, needs finite values and a finite "
            "score; find where they diverge, or leave the token out of trained"
        )
    if isinstance(long_loss, Tensor):
        return weights_RL
    return weights_RL.numpy()


def _tensor(values: Values) -> Tensor:
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.array(values))


def _fit(name: str, values: Values | None, long_RL: Tensor, *, is_mask: bool = False) -> Tensor:
    if values is None:
        raise UserError(f"{name}: got None, this score needs it, [rows, tokens]")
    tensor = _tensor(values)
    if tensor.shape != long_RL.shape:
        raise UserError(f"{name}: got shape {list(tensor.shape)}, needs long_loss's {list(long_RL.shape)}")
    if is_mask and tensor.dtype != torch.bool:
        raise UserError(f"{name}: got {tensor.dtype}, needs bool; compare it with 0 first")
    return tensor.to(long_RL.device)


def _check(score: str, post: str, strength: float, clip: float | None, shift: float | None) -> None:
    if score not in POSTS:
        raise UserError(f"score: got {score}, needs one of {', '.join(POSTS)}")
    has_gamma = post == "none" and score in ("focal", "mile")
    for holds, message in (
        (post in POSTS[score], f"post: got {post}, score {score} needs one of {', '.join(POSTS[score])}"),
        (post != "dense" or 0 <= strength <= 1, f"strength: got {strength}, post dense needs 0 <= lambda <= 1"),
        (post != "sparse" or 0 < strength <= 1, f"strength: got {strength}, post sparse needs 0 < kappa <= 1"),
        (not has_gamma or 0 <= strength < math.inf, f"strength: got {strength}, score {score} needs gamma >= 0"),
        (clip is None or 0 < clip < math.inf, f"clip: got {clip}, needs a finite number > 0, or None for no bound"),
        (shift is None or score in ("ppmi", "npmi"), f"shift: got {shift}, only ppmi and npmi have one"),
        (shift is None or 1 <= shift < math.inf, f"shift: got {shift}, needs a finite k >= 1"),
    ):
        if not holds:
            raise UserError(message)


@torch.no_grad()
def weigh_rows(
    losses: Mapping[str, Tensor],
    trained_RL: Tensor,
    same_RL: Tensor | None,
    *,
    score: str,
    post: str,
    strength: float,
    clip: float | None,
    shift: float | None,
    seeds: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute weights as `weigh` does, from valid arguments and without reading anything on the host.

    `losses` is what the score reads, by its name in `weigh`, [R, L] each; `seeds` has one for each row. Returns the
    weights, float32 [R, L], all NaN if the score of a trained token is not finite; the scores, float64 [R, L], 0 for
    untrained tokens; and where a score is not finite, bool [R, L].
    """
    pmi_RL = losses[reads(score)[0]].double()
    if "short_loss" in reads(score):
        pmi_RL = losses["short_loss"].double() - pmi_RL
    ignored_RL = ~trained_RL
    if same_RL is not None:
        ignored_RL = ignored_RL | same_RL
    pmi_RL = pmi_RL.masked_fill(ignored_RL, 0.0)
    gamma = strength if post == "none" else 1  # dense and sparse use strength for themselves
    bound = LONGCE_GAMMA if clip is None else clip
    # one row at a time: torch rounds the end of an array differently
    scores_RL = torch.stack([_score(score, pmi_L, shift or 1, gamma, bound) for pmi_L in pmi_RL])
    scores_RL = scores_RL.masked_fill(~trained_RL, 0.0)
    bad_RL = ~(pmi_RL.isfinite() & scores_RL.float().isfinite())
    rows = zip(scores_RL, trained_RL, seeds, strict=True)
    weights_RL = torch.stack([_weights(post, *row, strength) for row in rows])
    weights_RL = weights_RL.masked_fill(bad_RL.any(), torch.nan)
    if clip is not None:
        weights_RL = weights_RL.clamp(max=clip)
    return weights_RL.float(), scores_RL, bad_RL


def _score(score: str, pmi_L: Tensor, shift: float, gamma: float, bound: float) -> Tensor:
    """Compute the scores of a row from its PMI or, for focal and mile, from its losses or entropies."""
    match score:
        case "abs":
            return pmi_L.abs()
        case "ppmi":
            return (pmi_L - math.log(shift)).clamp(min=0)
        case "npmi":
            return (-pmi_L - math.log(shift)).clamp(min=0)
        case "longce":
            return pmi_L.exp().clamp(max=bound)
        case "rho1":
            return -pmi_L
        case "focal":  # a loss may be a rounding error below 0
            return (-(-pmi_L).expm1()).clamp(min=0) ** gamma
        case _:  # mile
            return (1 + pmi_L.clamp(min=0)) ** gamma


def _weights(post: str, scores_L: Tensor, trained_L: Tensor, seed: int, strength: float) -> Tensor:
    """Turn the scores of a row into weights; float64 [L]."""
    if post == "sparse":
        return _sparse(scores_L, trained_L, seed, strength)
    uniform_L = trained_L.double()
    is_scored = (scores_L != 0).any()
    if post == "dense":
        size_L = scores_L.abs()
        share_L = size_L / size_L.sum()
        scores_L = strength + (1 - strength) * uniform_L.sum() * share_L
    return torch.where(is_scored, uniform_L * scores_L, uniform_L)


def _sparse(scores_L: Tensor, trained_L: Tensor, seed: int, strength: float) -> Tensor:
    """Keep the k = floor(strength * M) highest scores, at least 1; ties for the last places are drawn.

    scores    3 0 0 1 0        strength 0.6, M = 5: k = 3
    weights   w 0 w w 0        w = 5/3; the seed drew one of three zeros
    """
    count = trained_L.sum().double()
    # 0.29 * 100 is 29, though the nearest double to 0.29 is below it
    share = (strength * count * (1 + 1e-12)).floor().clamp(min=1)
    kept = torch.where((scores_L != 0).any(), share, count).long()
    ranked_L = scores_L.masked_fill(~trained_L, -torch.inf)
    descending_L = ranked_L.sort(descending=True).values
    last = descending_L.gather(0, kept.clamp(min=1)[None] - 1)
    chosen_L = ranked_L > last
    tied_L = ranked_L == last
    # A token's word depends only on (seed, position). Philox's raw words are fixed by its definition, on every device.
    key = np.array([seed, PURPOSE], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(len(scores_L)) >> np.uint64(1)
    words_L = moved(torch.from_numpy(words.astype(np.int64)), scores_L.device)
    # a sort, not a sample: neighbors of a token change neither its word nor the order of the others
    order_L = words_L.masked_fill(~tied_L, torch.iinfo(torch.int64).max).sort(stable=True).indices
    places = torch.arange(len(order_L), device=order_L.device)
    is_drawn = places < kept - chosen_L.sum()
    chosen_L |= torch.zeros_like(tied_L).scatter(0, order_L, is_drawn)
    return chosen_L * (count / kept.clamp(min=1))
