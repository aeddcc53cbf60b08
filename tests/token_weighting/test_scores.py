"""Scores of one context, and numbers at the edge of rounding; the equations are in reference.py."""

from __future__ import annotations

import math

import numpy as np

from megatron_ext.token_weighting import weigh

LONG, SHORT = [[1.0, 2.0, 3.0, 4.0]], [[3.0, 2.0, 2.0, 5.0]]
DOUBT = [[0.0, math.log(2), math.log(4), math.log(4)]]  # p 1 1/2 1/4 1/4
ENTROPY = [[0.0, 1.0, 2.0, 1.0]]


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
