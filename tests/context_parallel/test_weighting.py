"""Token weights under every layout: the weights, the losses and the trained model are those of one process."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.config import WeightingConfig
from tests.context_parallel.cases import (
    CP2,
    CP2_DP2,
    CP2_PP2,
    CP2_TP2,
    CP4,
    DP2,
    PP2,
    STEPS,
    TP2,
    Case,
    Layout,
    Outcome,
    Runs,
    Weighed,
    errors,
)

TOLERANCE, DENSE_UNFROZEN = 1e-5, 2e-5
LAYOUTS = (CP2, TP2, PP2, DP2, CP4, CP2_TP2, CP2_PP2, CP2_DP2)
FAST = (CP2,)  # weights under PP 2: parity/test_oracle.py

UNFROZEN = WeightingConfig(token_weighting="unfrozen", short_context=32)
REACH = WeightingConfig(token_weighting="unfrozen", short_context=48, short_stride=24)
FROZEN = WeightingConfig(token_weighting="frozen", score_store="Case.short_losses")
EXPOSURE = WeightingConfig(token_weighting="unfrozen", weight_score="exposure", weight_post="none", exposure_alpha=1.5)


def unfrozen(**options: Any) -> WeightingConfig:
    return replace(UNFROZEN, **options)


def dense_cases() -> Iterator[Case]:
    """The short pass in all its shapes: masks, windows, micro-batches, pieces of chunks."""
    for document_mask in (True, False):
        for size in (1, 2):
            yield Case(132, document_mask, "zigzag", micro_batch=size, rows=2 * size, weighting=UNFROZEN)
    yield Case(132, False, "balanced", "ulysses", weighting=unfrozen(short_context=50, short_stride=50), rows=4)
    yield Case(90, True, "auto", weighting=unfrozen(short_context=7, short_stride=1))
    yield Case(8, True, weighting=UNFROZEN)  # every segment lies inside a chunk: nothing is scored
    yield Case(20, True, weighting=UNFROZEN)
    for window in (
        4,
        12,
        24,
    ):  # what a chunk scores is 24 tokens from its start: two layers of left_window 24 look beyond it
        yield Case(window, False, window_mask="sliding", weighting=REACH)
    yield Case(4, False, window_mask="sliding", local_window=21, weighting=REACH)
    yield Case(132, False, trained="uneven", weighting=unfrozen(loss_denominator="weights"), z_loss=1e-3)
    yield Case(132, True, trained="none", weighting=UNFROZEN)
    yield Case(40, False, "zigzag", window_mask="sliding", local_window=60, weighting=UNFROZEN)
    ppmi = unfrozen(weight_score="ppmi")
    yield Case(9, True, "balanced", local_window=70, local_window_fixed=True, weighting=ppmi)
    yield Case(132, False, weighting=unfrozen(weight_score="npmi", weight_shift=1.05, weight_clip=3.0))
    yield Case(132, False, weighting=unfrozen(weight_score="longce", weight_post="none", loss_denominator="weights"))
    focal = WeightingConfig(token_weighting="unfrozen", weight_score="focal", weight_post="none", weight_strength=2.0)
    yield Case(132, True, "zigzag", weighting=focal)
    yield Case(132, True, "zigzag", weighting=replace(focal, weight_score="mile", loss_denominator="weights"))
    yield Case(132, False, weighting=WeightingConfig(token_weighting="dataset", loss_denominator="weights"))
    yield Case(40, True, "zigzag", trained="uneven", micro_batch=2, rows=4, weighting=EXPOSURE)
    yield Case(132, False, weighting=replace(EXPOSURE, exposure_tau=8, loss_denominator="weights"))
    yield Case(132, False, recompute="full", weighting=UNFROZEN)
    yield Case(132, False, overlaps=True, weighting=UNFROZEN)


def frozen_cases() -> Iterator[Case]:
    for score in ("abs", "ppmi", "rho1"):
        sparse = replace(FROZEN, weight_score=score, weight_post="sparse")
        yield Case(132, True, "zigzag", weighting=sparse)
        yield Case(132, False, "balanced", trained="uneven", weighting=sparse, micro_batch=2, rows=4)
    yield Case(50, False, "contiguous", "ulysses", weighting=FROZEN)


def sparse_unfrozen_cases() -> Iterator[Case]:
    for document_mask in (True, False):
        yield Case(132, document_mask, "zigzag", weighting=unfrozen(weight_post="sparse"))


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(lambda layout: [*dense_cases(), *frozen_cases(), *sparse_unfrozen_cases()])


def by_row(outcomes: Sequence[Outcome], step: int, length: int) -> dict[int, np.ndarray]:
    """By row, (weights, scores) float64 [2, L]; what several processes weighed, they weighed alike."""
    rows: dict[int, np.ndarray] = {}
    pieces: list[Weighed] = [piece for outcome in outcomes for piece in outcome.weighed[step]]
    for piece in pieces:
        for number, seed in enumerate(piece.seeds):
            mine = piece.held // length == number
            places = piece.held[mine] % length
            row = rows.setdefault(seed, np.full((2, length), np.nan))
            values = np.stack([piece.weights[mine], piece.scores[mine]])
            known = ~np.isnan(row[0, places])
            np.testing.assert_array_equal(row[:, places][:, known], values[:, known])
            row[:, places] = values
    assert not any(np.isnan(row).any() for row in rows.values())
    return rows


def assert_same(runs: Runs, layout: Layout, case: Case, tolerance: float) -> None:
    outcomes, alone = runs.of(layout, case), runs.alone(case)
    found = errors(outcomes[0], alone)
    assert max(found.values()) <= tolerance, (case, found)
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.weight_metrics, alone.weight_metrics, rtol=1e-4, atol=1e-6)
        assert outcome.train_loss == outcomes[0].train_loss


each_layout = pytest.mark.parametrize(
    "layout", [pytest.param(one, id=one.name, marks=[] if one in FAST else [pytest.mark.slow]) for one in LAYOUTS]
)


def both_by_row(runs: Runs, layout: Layout, case: Case, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each row of a step, what the layout's processes and what one process weighed."""
    ours = by_row(runs.of(layout, case), step, case.length)
    theirs = by_row([runs.alone(case)], step, case.length)
    assert ours.keys() == theirs.keys()
    yield from ((ours[seed], theirs[seed]) for seed in theirs)


@each_layout
def test_dense_weights_train_the_same_model(runs: Runs, layout: Layout) -> None:
    for case in dense_cases():
        assert_same(runs, layout, case, DENSE_UNFROZEN)
        for step in range(STEPS):
            for ours, theirs in both_by_row(runs, layout, case, step):
                np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@each_layout
def test_frozen_scores_select_exactly_the_same_tokens(runs: Runs, layout: Layout) -> None:
    for case in frozen_cases():
        assert_same(runs, layout, case, TOLERANCE)
        for step in range(STEPS):
            for (weights, _), (others, _) in both_by_row(runs, layout, case, step):
                if case.weighting.weight_post == "sparse":
                    np.testing.assert_array_equal(weights, others)
                    assert 0 < (others == 0).sum() < case.length


@each_layout
def test_sparse_unfrozen_selections_differ_only_at_the_threshold(runs: Runs, layout: Layout) -> None:
    for case in sparse_unfrozen_cases():
        for (weights, scores), (other_weights, other_scores) in both_by_row(runs, layout, case, 0):
            np.testing.assert_allclose(scores, other_scores, atol=1e-5)
            threshold = other_scores[other_weights > 0].min()
            differs = (weights > 0) != (other_weights > 0)
            assert (np.abs(other_scores[differs] - threshold) <= 1e-5).all()
