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


def exposure_weights(ends: list[list[int]], trained: np.ndarray, *, tau: int, alpha: float, gamma: float) -> np.ndarray:
    """The weights of EXACT of the targets of rows, float64 [R, L]; `ends` are the document ends of each row.

    Each bucket is found by trying all, each context by counting tokens back to the start of the document.
    """
    buckets = [(0, 7)] + [(2**power, 2 ** (power + 1) - 1) for power in range(3, 40)]

    borders = [{0, *map(int, of_row)} for of_row in ends]

    def bucket_of(row: int, target: int) -> tuple[int, int]:
        before = 0
        while target - before not in borders[row]:
            before += 1
        return next((low, high) for low, high in buckets if low <= before <= high)

    of_targets = [[bucket_of(row, target) for target in range(1, trained.shape[1] + 1)] for row in range(len(trained))]
    counts: dict[tuple[int, int], int] = {}
    for row, places in enumerate(of_targets):
        for place, bucket in enumerate(places):
            if trained[row, place] and bucket[0] >= tau:
                counts[bucket] = counts.get(bucket, 0) + 1
    share = {bucket: count / sum(counts.values()) for bucket, count in counts.items()}
    rarity = {bucket: q**-gamma for bucket, q in share.items()}
    mean = math.fsum(share[bucket] * rarity[bucket] for bucket in share)
    return np.array([[1 + alpha * rarity.get(bucket, 0.0) / mean for bucket in places] for places in of_targets])
