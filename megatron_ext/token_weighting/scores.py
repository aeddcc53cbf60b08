"""Score tokens by how much their long context changes their loss, by an excess loss, or by their difficulty.

    PMI = log p_long - log p_short = short_loss - long_loss

weigh.py has the equations. abs is of arXiv 2503.09202, longce 2410.23771, rho1 2404.07965, focal 1708.02002, mile
2310.19531; under ppmi the long context helps, under npmi it harms.

Legend: L tokens of a row. Everything is float64.
"""

from __future__ import annotations

import math
from enum import StrEnum

from torch import Tensor

LONGCE_GAMMA = 5.0  # the default of the LongCE authors' code


class Score(StrEnum):
    """The scores; values of `--weight-score`."""

    ABS = "abs"
    PPMI = "ppmi"
    NPMI = "npmi"
    LONGCE = "longce"
    RHO1 = "rho1"
    FOCAL = "focal"
    MILE = "mile"

    @property
    def reads(self) -> tuple[str, ...]:
        """The arguments of `weigh` that the score is computed from."""
        if self is Score.FOCAL:
            return ("long_loss",)
        return ("entropy",) if self is Score.MILE else ("long_loss", "short_loss")


def score_tokens(score: Score, pmi_L: Tensor, *, shift: float, strength: float, bound: float) -> Tensor:
    """Compute the scores of a row.

    Args:
        score: which score.
        pmi_L: float64 [L]: the PMI; for `focal`, the entropy in nats for `mile`.
        shift: k, of ppmi and npmi; 1 is no shift.
        strength: gamma, the exponent of focal and mile.
        bound: gamma, the highest score of longce.

    Returns:
        float64 [L], >= 0 except for rho1.
    """
    if score is Score.ABS:
        return pmi_L.abs()
    if score is Score.PPMI:
        return (pmi_L - math.log(shift)).clamp(min=0)
    if score is Score.NPMI:
        return (-pmi_L - math.log(shift)).clamp(min=0)
    if score is Score.LONGCE:
        return pmi_L.exp().clamp(max=bound)
    if score is Score.RHO1:
        return -pmi_L
    if score is Score.FOCAL:
        # a loss may be a rounding error below 0
        return (-(-pmi_L).expm1()).clamp(min=0) ** strength
    return (1 + pmi_L.clamp(min=0)) ** strength
