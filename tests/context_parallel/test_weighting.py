"""Token weights under every layout: the weights, the losses and the trained model are those of one process."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.config import WeightingConfig
from tests.context_parallel.cases import LAYOUTS, Case, Layout, Runs, errors

TOLERANCE = 1e-5
DENSE = 2e-5
UNFROZEN = WeightingConfig(token_weighting="unfrozen", short_context=32)
REACH = WeightingConfig(token_weighting="unfrozen", short_context=48, short_stride=24)
FROZEN = WeightingConfig(token_weighting="frozen", score_store="Case.short_losses")
EXPOSURE = WeightingConfig(token_weighting="unfrozen", weight_score="exposure", weight_post="none", exposure_alpha=1.5)


def unfrozen(**options: Any) -> WeightingConfig:
    return replace(UNFROZEN, **options)


def cases() -> Iterator[Case]:
    """The short pass in all its shapes: masks, windows, micro-batches, pieces of chunks; then stored scores."""
    for document_mask in (True, False):
        for size in (1, 2):
            yield Case(132, document_mask, "zigzag", micro_batch=size, rows=2 * size, weighting=UNFROZEN)
    yield Case(132, False, "balanced", "ulysses", weighting=unfrozen(short_context=50, short_stride=50), rows=4)
    yield Case(90, True, "auto", weighting=unfrozen(short_context=7, short_stride=1))
    yield Case(8, True, weighting=UNFROZEN)  # every segment lies inside a chunk: nothing is scored
    yield Case(20, True, weighting=UNFROZEN)
    for window in (4, 12, 24):  # a chunk scores 24 tokens from its start: two layers of left window 24 look beyond it
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
    for score in ("abs", "ppmi", "rho1"):
        sparse = replace(FROZEN, weight_score=score, weight_post="sparse")
        yield Case(132, True, "zigzag", weighting=sparse)
        yield Case(132, False, "balanced", trained="uneven", weighting=sparse, micro_batch=2, rows=4)
    yield Case(50, False, "contiguous", "ulysses", weighting=FROZEN)


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(lambda layout: [list(cases())])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_weights_train_the_same_model(runs: Runs, layout: Layout) -> None:
    """A token that weighed otherwise would change losses, norms and weights, and what is reported of the weights."""
    for case in cases():
        outcomes = runs.of(layout, case)
        alone = runs.alone(case)
        differences = errors(outcomes[0], alone)
        assert max(differences.values()) <= (TOLERANCE if case.weighting.weight_post == "sparse" else DENSE), (
            case,
            differences,
        )
        for outcome in outcomes:
            np.testing.assert_allclose(outcome.weight_metrics, alone.weight_metrics, rtol=1e-4, atol=1e-6)
            assert outcome.train_loss == outcomes[0].train_loss
