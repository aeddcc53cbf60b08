"""What `weigh` takes, gives back and refuses."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.token_weighting import weigh
from megatron_ext.token_weighting.weigh import POSTS
from tests.conftest import ON_GPU

LONG = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 0.5, 1.0]], dtype=np.float32)
SHORT = np.array([[3.0, 2.0, 2.0, 5.0], [2.0, 2.0, 2.5, 0.0]], dtype=np.float32)
ENTROPY = np.array([[0.0, 1.0, 2.0, 1.0], [3.0, 0.5, 0.5, 0.0]], dtype=np.float32)
PAIRS = [(score, post) for score, posts in POSTS.items() for post in posts]
REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"score": "pmi"}, "score: got pmi, needs one of abs", {"score": "abs"}),
    ({"post": "top"}, "post: got top, score abs needs one of dense, sparse, none", {"post": "sparse"}),
    ({"score": "rho1", "post": "dense"}, "post: got dense", {"score": "rho1", "post": "sparse"}),
    ({"strength": -0.001}, "strength: got -0.001, post dense needs 0 <= lambda <= 1", {"strength": 0}),
    ({"strength": np.nan}, "strength: got nan", {"strength": 1}),
    ({"post": "sparse", "strength": 0}, "needs 0 < kappa <= 1", {"post": "sparse", "strength": 1e-9}),
    ({"clip": 0}, "clip: got 0", {"clip": 0.1}),
    ({"shift": 2}, "shift: got 2, only ppmi and npmi", {"score": "npmi", "shift": 2}),
    ({"score": "ppmi", "shift": 0.5}, "shift: got 0.5", {"score": "ppmi", "shift": 1}),
    ({"short_loss": None}, "short_loss: got None", {"short_loss": None, "score": "focal"}),
    ({"score": "mile"}, "entropy: got None", {"score": "mile", "entropy": ENTROPY}),
    ({"entropy": ENTROPY}, "entropy: score abs does not read it", {"entropy": None}),
    ({"score": "focal", "same_context": LONG > 1}, "same_context: score focal does", {"same_context": LONG > 1}),
    ({"long_loss": LONG[0]}, "long_loss: got shape [4]", {"long_loss": LONG[:1], "short_loss": SHORT[:1]}),
    ({"short_loss": SHORT[:, :3]}, "short_loss: got shape [2, 3], needs long_loss's [2, 4]", {"short_loss": SHORT}),
    ({"trained": np.ones((2, 4))}, "trained: got torch.float64, needs bool", {"trained": np.ones((2, 4)) > 0}),
    ({"seed": [1, 2, 3]}, "seed: got [1, 2, 3]", {"seed": np.array([1, 2])}),
    ({"seed": [0, 2**64]}, "needs 0 <= seed < 2^64", {"seed": [0, 2**64 - 1]}),
]


def call(options: dict[str, Any]) -> np.ndarray:
    return weigh(**{"long_loss": LONG, "short_loss": SHORT, **options})


@pytest.mark.parametrize(("refused", "text", "accepted"), REFUSED)
def test_refusals_and_accepted_neighbours(refused: dict[str, Any], text: str, accepted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        call(refused)
    assert np.isfinite(call(accepted)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("post", ["dense", "sparse", "none"])
def test_a_score_that_is_not_finite_is_named(value: float, post: str) -> None:
    short = SHORT.copy()
    short[1, 2] = value
    with pytest.raises(ValueError, match="diverge") as caught:
        weigh(LONG, short, post=post)
    assert str(caught.value) == (
        f"score abs: row 1, position 2 got long_loss 0.5, short_loss {value:g}, needs finite values and a finite score;"
        " find where they diverge, or leave the token out of trained"
    )
    here = np.zeros_like(LONG, bool)
    here[1, 2] = True
    assert weigh(LONG, short, post=post, trained=~here)[1, 2] == 0
    assert np.isfinite(weigh(LONG, short, post=post, same_context=here)).all()


def test_what_an_infinite_loss_or_an_overflow_is_called() -> None:
    with pytest.raises(ValueError, match=r"^score focal: row 0, position 1 got long_loss inf, needs"):
        weigh([[1.0, np.inf]], None, score="focal")
    with pytest.raises(ValueError, match=r"^score longce: row 0, position 0 got long_loss -inf, short_loss 1, needs"):
        weigh([[-np.inf]], [[1.0]], score="longce", post="none")
    with pytest.raises(ValueError, match=r"^score mile: row 0, position 1 got entropy 9, needs"):
        weigh([[1.0, 1.0]], None, score="mile", post="none", strength=40, entropy=[[1.0, 9.0]])
    assert np.isfinite(weigh([[1.0, 1.0]], None, score="mile", post="none", strength=38, entropy=[[1.0, 9.0]])).all()


@pytest.mark.parametrize(("score", "post"), PAIRS)
def test_tensors_arrays_and_lists_agree_and_stay_as_they_are(score: str, post: str) -> None:
    trained = np.array([[True, True, False, True], [True] * 4])
    before = (LONG.copy(), SHORT.copy(), ENTROPY.copy())

    def weighed(kind: Any) -> Any:
        entropy = {"entropy": kind(ENTROPY)} if score == "mile" else {}
        options = {"score": score, "post": post, "strength": 0.4, "seed": [5, 6]}
        return weigh(kind(LONG), kind(SHORT), trained=kind(trained), **options, **entropy)

    array = weighed(np.asarray)
    lists = weighed(np.ndarray.tolist)
    tensor = weighed(torch.tensor)
    learned = weighed(lambda values: torch.tensor(values, requires_grad=values.dtype == np.float32))
    assert isinstance(array, np.ndarray)
    assert isinstance(tensor, torch.Tensor)
    assert array.dtype == lists.dtype == np.float32
    assert tensor.dtype == torch.float32
    assert not learned.requires_grad
    for weights in (lists, tensor.numpy(), learned.numpy()):
        np.testing.assert_array_equal(weights, array)
    for now, was in zip((LONG, SHORT, ENTROPY), before, strict=True):
        np.testing.assert_array_equal(now, was)


def test_small_differences_and_doubts_keep_their_digits() -> None:
    long = np.full((1, 3), 1000.0)
    weights = weigh(long, long + np.array([1e-6, 2e-6, 3e-6]), strength=0)  # all equal in float32
    np.testing.assert_allclose(weights, [[0.5, 1, 1.5]], rtol=1e-6)
    weights = weigh([[1e-12, 3e-12]], None, score="focal", post="dense", strength=0)
    np.testing.assert_allclose(weights, [[0.5, 1.5]], rtol=2e-7)


def test_a_loss_or_entropy_below_zero_by_rounding_counts_as_zero() -> None:
    focal = weigh([[-1e-7, 1.0]], None, score="focal", post="none", strength=0.5)
    np.testing.assert_allclose(focal, [[0, math.sqrt(1 - math.exp(-1))]], rtol=2e-7)
    mile = weigh(LONG[:1], None, score="mile", post="none", strength=2, entropy=[[-1e-7, 0.0, 1.0, 0.0]])
    np.testing.assert_array_equal(mile, [[1, 1, 4, 1]])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU and ON_GPU=1")
@pytest.mark.parametrize(("score", "post"), PAIRS)
def test_a_gpu_agrees_with_the_cpu(score: str, post: str) -> None:
    draw = np.random.default_rng(0)
    long, short, entropy = (torch.tensor(draw.integers(0, 40, (3, 5001)) / 8) for _ in range(3))
    extra = {"entropy": entropy} if score == "mile" else {}
    options = {"score": score, "post": post, "strength": 0.3, "trained": torch.tensor(draw.random((3, 5001)) < 0.9)}
    on_cpu = weigh(long, short, **options, **extra)
    on_gpu = weigh(long.cuda(), short.cuda(), **options, **extra)
    assert on_gpu.device.type == "cuda"
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-6, atol=1e-7)
