"""Weights of rows: against plain Python, their sums, zeros and ties, and the seeded draw."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.token_weighting import weigh
from megatron_ext.token_weighting.weigh import POSTS
from tests.token_weighting.reference import row_weights, score_of

PAIRS = [(score, post) for score, posts in POSTS.items() for post in posts]
GRID = st.integers(0, 40).map(lambda eighths: eighths / 8)  # exact in float32, with many ties
LOSSES = st.floats(0, 30, width=32)
JUNK = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30])


@dataclass
class Case:
    """Arguments of `weigh` for R rows of N tokens."""

    long: np.ndarray
    short: np.ndarray
    entropy: np.ndarray
    trained: np.ndarray
    same: np.ndarray
    seeds: list[int]

    def take(self, rows: list[int]) -> "Case":
        arrays = (self.long, self.short, self.entropy, self.trained, self.same)
        return Case(*(array[rows] for array in arrays), [self.seeds[row] for row in rows])

    def options(self, score: str) -> dict[str, Any]:
        extra = {"entropy": self.entropy} if score == "mile" else {}
        extra |= {"same_context": self.same} if score not in ("focal", "mile") else {}
        return {"score": score, "trained": self.trained, "seed": self.seeds, **extra}

    def weigh(self, score: str, **options: Any) -> np.ndarray:
        return weigh(self.long, self.short, **self.options(score), **options)


@st.composite
def cases(draw: st.DrawFn, losses: st.SearchStrategy[float] = GRID) -> Case:
    """Rows with masks; where no loss is read, it may be anything."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 14))

    def array(values: st.SearchStrategy[Any], dtype: Any) -> np.ndarray:
        size = shape[0] * shape[1]
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=dtype).reshape(shape)

    long, short, entropy = (array(losses, np.float32) for _ in range(3))
    trained, same = array(st.booleans(), bool), array(st.booleans(), bool)
    rubbish = array(JUNK, np.float32)
    short = np.where(trained & ~same, short, rubbish)
    entropy, long = np.where(trained, entropy, rubbish), np.where(trained, long, rubbish)
    seeds = draw(st.lists(st.integers(0, 2**64 - 1), min_size=shape[0], max_size=shape[0]))
    return Case(long, short, entropy, trained, same, seeds)


def strengths(post: str) -> st.SearchStrategy[float]:
    return st.floats(0.01 if post == "sparse" else 0, 1) | st.sampled_from([0.2, 0.4, 0.5, 0.75, 1.0])


def expected(case: Case, score: str, post: str, strength: float, shift: float = 1) -> list[list[float]]:
    power = score in ("focal", "mile")
    gamma = (strength if post == "none" else 1.0) if power else 5.0
    rows = []
    for row in range(len(case.long)):
        scores = [
            score_of(score, float(long), float(short), float(entropy), same=same, shift=shift, gamma=gamma)
            if trained
            else None
            for long, short, entropy, trained, same in zip(
                case.long[row], case.short[row], case.entropy[row], case.trained[row], case.same[row], strict=True
            )
        ]
        rows.append(row_weights(scores, post, strength, case.seeds[row]))
    return rows


@pytest.mark.parametrize(("score", "post"), PAIRS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), case=cases())
def test_against_plain_python(score: str, post: str, data: st.DataObject, case: Case) -> None:
    strength = data.draw(strengths(post))
    shifts = score in ("ppmi", "npmi")
    shift = data.draw(st.sampled_from([None, 1, 2, 3.5])) if shifts else None
    weights = case.weigh(score, post=post, strength=strength, shift=shift)
    wanted = expected(case, score, post, strength, shift or 1)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("score", "post"), PAIRS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), case=cases(LOSSES))
def test_a_row_is_the_same_bits_in_any_company(score: str, post: str, data: st.DataObject, case: Case) -> None:
    strength = data.draw(strengths(post))
    rows = data.draw(st.permutations(range(len(case.long))))
    together = case.weigh(score, post=post, strength=strength)
    np.testing.assert_array_equal(case.take(rows).weigh(score, post=post, strength=strength), together[rows])
    for row in rows:
        np.testing.assert_array_equal(case.take([row]).weigh(score, post=post, strength=strength), together[[row]])


@pytest.mark.parametrize(
    ("kappa", "tokens", "kept"),
    [
        (0.2, 10, 2),
        (0.35, 10, 3),
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
        (2 / 3, 150, 100),
        (0.001, 3, 1),
        (1.0, 10, 10),
    ],
)
def test_sparse_keeps_the_share_rounded_down(kappa: float, tokens: int, kept: int) -> None:
    weights = weigh([list(range(tokens))], [[-1.0] * tokens], post="sparse", strength=kappa)
    np.testing.assert_allclose(weights, [[0] * (tokens - kept) + [tokens / kept] * kept], rtol=1e-7)


@pytest.mark.parametrize("post", ["dense", "sparse", "none"])
def test_clip_bounds_the_weights_last(post: str) -> None:
    pmi = np.array([[4.0, 0.0, 1.0, 3.0]])
    free, clipped = (weigh(0 * pmi, pmi, post=post, strength=0.5, clip=clip) for clip in (None, 1.2))
    assert free.max() > 1.2
    np.testing.assert_array_equal(clipped, np.minimum(free, np.float32(1.2)))
