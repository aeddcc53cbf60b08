"""The equations of token weighting, one token at a time in plain Python."""

import math
from fractions import Fraction

import numpy as np

STREAM = 0x77656967687473  # "weights": the second word of the draw's key


def score_of(score: str, long: float, short: float, entropy: float, *, same: bool, shift: float, gamma: float) -> float:
    if score == "focal":
        return (-math.expm1(-long)) ** gamma
    if score == "mile":
        return (1 + entropy) ** gamma
    pmi = 0.0 if same else short - long
    return {
        "abs": abs(pmi),
        "ppmi": max(pmi - math.log(shift), 0.0),
        "npmi": max(-pmi - math.log(shift), 0.0),
        "longce": min(math.exp(min(pmi, 700)), gamma),
        "rho1": -pmi,
    }[score]


def row_weights(scores: list[float | None], post: str, strength: float, seed: int) -> list[float]:
    """The weights of a row of scores; None marks a token that is not trained."""
    trained = [i for i, score in enumerate(scores) if score is not None]
    values = {i: float(scores[i]) for i in trained}  # type: ignore[arg-type]
    weights = [0.0] * len(scores)
    if all(value == 0 for value in values.values()):
        chosen = dict.fromkeys(trained, 1.0)
    elif post == "dense":
        total = math.fsum(abs(value) for value in values.values())
        chosen = {i: strength + (1 - strength) * len(trained) * abs(value) / total for i, value in values.items()}
    elif post == "sparse":
        kept = max(1, math.floor(Fraction(strength) * len(trained) * (1 + Fraction(1, 10**12))))
        luck = np.random.Philox(key=np.array([seed, STREAM], dtype=np.uint64)).random_raw(len(scores))
        best = sorted(trained, key=lambda i: (-values[i], int(luck[i])))[:kept]
        chosen = {i: len(trained) / kept for i in best}
    else:
        chosen = values
    for i, weight in chosen.items():
        weights[i] = weight
    return weights
