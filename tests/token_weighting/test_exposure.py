"""Weights by effective context: against a count by hand, in every share of a global batch alike."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.config import Config, DataConfig, WeightingConfig, WindowConfig
from megatron_ext.data.row import TokenRow
from megatron_ext.run.batches import BatchMaker
from megatron_ext.token_weighting.exposure import exposure_rows
from tests.run.test_batches import ranks
from tests.token_weighting.reference import exposure_weights

LENGTH = 300
ROWS = 8
EXPOSURE = WeightingConfig(token_weighting="unfrozen", weight_score="exposure", weight_post="none", exposure_tau=20)


def row_at(sample: int) -> TokenRow:
    """Documents that end anywhere, also at the row's end; half of the targets are trained, of one row none."""
    chance = np.random.default_rng(sample)
    ends = np.unique(np.cumsum(1 + LENGTH ** chance.random(30)).astype(int))
    if sample % 3 == 0:
        ends = np.append(ends[ends < LENGTH], LENGTH)
    trained = (chance.random(LENGTH) < 0.5) & (sample % ROWS != 4)
    return TokenRow(chance.integers(0, 50, LENGTH + 1), ends[ends <= LENGTH], trained)


def config(weighting: WeightingConfig, *, document_mask: bool = True, **data: Any) -> Config:
    sizes = {"seq_length": LENGTH, "global_batch_size": ROWS}
    window = WindowConfig(document_mask=document_mask)
    return Config(data=DataConfig(**sizes, **data), window=window, weighting=weighting)


def by_hand(samples: Sequence[int], weighting: WeightingConfig, *, document_mask: bool = True) -> np.ndarray:
    """float64 [R, L]."""
    rows = [row_at(sample) for sample in samples]
    ends = [row.document_ends if document_mask else [] for row in rows]
    options = {"alpha": weighting.exposure_alpha, "gamma": weighting.exposure_gamma}
    options["tau"] = LENGTH // 4 if weighting.exposure_tau is None else weighting.exposure_tau
    return exposure_weights(ends, np.stack([row.trained for row in rows]), **options)


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"exposure_tau": None},
        {"exposure_tau": 1},
        {"exposure_alpha": 2.0, "exposure_gamma": 1.0},
        {"exposure_gamma": 0.0},
    ],
    ids=str,
)
def test_the_weights_are_those_of_a_count_by_hand(options: dict[str, Any], document_mask: bool) -> None:
    weighting = replace(EXPOSURE, **options)
    weighed = exposure_rows(row_at, map(row_at, range(ROWS)), config(weighting, document_mask=document_mask))
    weights = np.stack([weighed(sample).weights for sample in range(ROWS)])
    expected = by_hand(range(ROWS), weighting, document_mask=document_mask)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert len(np.unique(expected)) > 1


def test_a_global_batch_without_a_tail_is_uniform() -> None:
    """The largest power of a rarity is finite too."""
    short = replace(row_at(0), document_ends=np.arange(1, LENGTH + 1))
    assert (exposure_rows(lambda _: short, [short] * ROWS, config(EXPOSURE))(0).weights == 1).all()
    steep = config(replace(EXPOSURE, exposure_gamma=1e4))
    assert np.isfinite(exposure_rows(row_at, map(row_at, range(ROWS)), steep)(0).weights).all()


@pytest.mark.parametrize("window", [7, LENGTH])
@pytest.mark.parametrize(
    "data", [{}, {"micro_batch_size": 2}, {"micro_batch_size": 2, "balance_batches": True}], ids=str
)
def test_every_rank_and_window_weighs_by_the_whole_global_batch(data: dict[str, Any], window: int) -> None:
    """A rank has its own rows, and a target's context is the full row's, whatever the window of the step."""
    first = 3 * ROWS
    seen = {}
    samples = range(first, first + ROWS)
    rows = {row_at(sample).tokens[:-1].tobytes(): number for number, sample in enumerate(samples)}
    expected = by_hand(samples, EXPOSURE)
    trained = np.stack([row_at(sample).trained for sample in samples])
    for rank in range(2):
        maker = BatchMaker(config(EXPOSURE, **data), ranks(rank, 2), None)
        for batch in maker.train(row_at, 3, first, window).train:
            assert batch.scores is None  # no losses are gathered
            assert batch.total_weight == pytest.approx(batch.weights_t[batch.trained_t].sum().item())
            for tokens, weights in zip(batch.tokens_t.split(LENGTH), batch.weights_t.split(LENGTH), strict=True):
                seen[rows[tokens.numpy().tobytes()]] = weights.numpy()
    actual = np.stack([seen[number] for number in range(ROWS)])
    np.testing.assert_allclose(actual[trained], expected[trained], rtol=1e-6)
