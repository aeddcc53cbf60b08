"""Every score with every postprocessing, worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megatron_ext.token_weighting import weigh

LONG, SHORT = [[1.0, 2.0, 3.0, 4.0]], [[3.0, 2.0, 2.0, 5.0]]  # PMI 2 0 -1 1
DOUBT = [[0.0, math.log(2), math.log(4), math.log(4)]]  # p 1 1/2 1/4 1/4
ENTROPY = [[0.0, 1.0, 2.0, 1.0]]
BY_HAND: list[tuple[str, str, dict[str, Any], list[float]]] = [
    ("abs", "dense", {}, [1.25, 0.75, 1, 1]),
    ("abs", "sparse", {"strength": 0.75}, [4 / 3, 0, 4 / 3, 4 / 3]),
    ("abs", "none", {}, [2, 0, 1, 1]),
    ("ppmi", "dense", {"strength": 0.25}, [2.25, 0.25, 0.25, 1.25]),
    ("ppmi", "sparse", {"strength": 0.5}, [2, 0, 0, 2]),
    ("ppmi", "none", {"shift": 2}, [2 - math.log(2), 0, 0, 1 - math.log(2)]),
    ("npmi", "dense", {"strength": 0.5}, [0.5, 0.5, 2.5, 0.5]),
    ("npmi", "none", {"shift": math.e}, [1, 1, 1, 1]),  # all scores 0
    ("longce", "none", {}, [5, 1, math.exp(-1), math.e]),
    ("longce", "none", {"clip": 2}, [2, 1, math.exp(-1), 2]),
    ("rho1", "sparse", {"strength": 0.5}, [0, 2, 2, 0]),
    ("focal", "dense", {"strength": 0}, [0, 1, 1.5, 1.5]),
    ("focal", "sparse", {"strength": 0.5}, [0, 0, 2, 2]),
    ("focal", "none", {"strength": 2}, [0, 0.25, 0.5625, 0.5625]),
    ("mile", "dense", {"strength": 0.5}, [0.75, 1, 1.25, 1]),
    ("mile", "none", {"strength": 2}, [1, 4, 9, 4]),
]


@pytest.mark.parametrize(("score", "post", "options", "wanted"), BY_HAND)
def test_by_hand(score: str, post: str, options: dict[str, Any], wanted: list[float]) -> None:
    if score == "mile":
        options = {**options, "entropy": ENTROPY}
    weights = weigh(DOUBT if score == "focal" else LONG, SHORT, score=score, post=post, **options)
    np.testing.assert_allclose(weights, [wanted], rtol=2e-7)


def test_scores_of_one_context_need_no_second_loss() -> None:
    np.testing.assert_array_equal(weigh(DOUBT, None, score="focal"), weigh(DOUBT, SHORT, score="focal"))
    alone = weigh(LONG, None, score="mile", entropy=ENTROPY)
    np.testing.assert_array_equal(alone, weigh(LONG, SHORT, score="mile", entropy=ENTROPY))


def test_a_loss_or_entropy_below_zero_by_rounding_counts_as_zero() -> None:
    focal = weigh([[-1e-7, 1.0]], None, score="focal", post="none", strength=0.5)
    np.testing.assert_allclose(focal, [[0, math.sqrt(1 - math.exp(-1))]], rtol=2e-7)
    mile = weigh(LONG, None, score="mile", post="none", strength=2, entropy=[[-1e-7, 0.0, 1.0, 0.0]])
    np.testing.assert_array_equal(mile, [[1, 1, 4, 1]])


def test_small_doubts_keep_their_digits() -> None:
    weights = weigh([[1e-12, 3e-12]], None, score="focal", post="dense", strength=0)
    np.testing.assert_allclose(weights, [[0.5, 1.5]], rtol=2e-7)
