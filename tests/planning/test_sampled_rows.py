"""Effective context, imbalance and exchange of sampled rows, against the code that training uses."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.data.rows.balance import assign_rows
from megatron_ext.planning.sampled_rows import BATCHES, SampledRows
from tests.runs import CONFIG

LENGTH = 4096
FLAGS = [*CONFIG, *f"--seq-length {LENGTH} --vocab-size 512 --global-batch-size 16 --document-mask".split()]


def rows_at(ends_of: Callable[[int], np.ndarray]) -> Callable[[int], TokenRow]:
    tokens = np.zeros(LENGTH + 1, dtype=np.int64)
    trained = np.ones(LENGTH, dtype=np.bool_)
    return lambda sample: TokenRow(tokens=tokens, document_ends=ends_of(sample), trained=trained)


def whole(sample: int) -> np.ndarray:
    return np.array([LENGTH])


def drawn(sample: int) -> np.ndarray:
    """Half of the rows are one document, the others many of different lengths."""
    if sample % 2:
        return whole(sample)
    ends = np.cumsum(np.random.default_rng(sample).integers(16, 700, size=LENGTH))
    return np.asarray(ends[ends < LENGTH])


@pytest.fixture(scope="module")
def config() -> Config:
    return parse(FLAGS)


@pytest.mark.parametrize("window", [96, 1000, LENGTH])
def test_rows_of_one_document_see_what_the_formula_says(config: Config, window: int) -> None:
    rows = SampledRows(config, rows_at(whole))
    assert rows.load(window, 1, 1).context == pytest.approx(config.mask_options().whole_row_context(LENGTH, window))
    assert rows.load(window, 1, 4).imbalance == pytest.approx(1.0)


def test_the_context_is_the_mean_of_squared_document_lengths(config: Config) -> None:
    rows = SampledRows(config, rows_at(lambda sample: np.array([1024])))
    assert rows.load(LENGTH, 1, 1).context == pytest.approx((1024**2 + 3072**2) / LENGTH)
    assert rows.load(1024, 1, 1).context == pytest.approx(1024)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16])
def test_assigned_rows_are_as_uneven_as_their_assignment(config: Config, replicas: int) -> None:
    balanced = replace(config, data=replace(config.data, balance_batches=True))
    rows = SampledRows(balanced, rows_at(drawn))
    costs = np.array([config.mask_options().at(LENGTH, [drawn(n)], LENGTH).context_sum for n in range(256)])
    batches = np.random.default_rng(0).choice(costs.astype(float), size=(BATCHES, 16))
    worst = []
    for batch in batches:
        assigned = batch[assign_rows(batch, replicas, 16 // replicas)].sum(axis=(1, 2))
        worst.append(assigned.max() / assigned.mean())
    assert rows.load(LENGTH, 1, replicas).imbalance == pytest.approx(np.mean(worst), rel=0.06)
    in_order = SampledRows(config, rows_at(drawn)).load(LENGTH, 1, replicas).imbalance
    assert in_order >= rows.load(LENGTH, 1, replicas).imbalance * (1 - 1e-9)


def test_local_layers_exchange_their_window_alone(config: Config) -> None:
    flags = ["--num-layers", "4", "--local-window", "64", "--window-attn-skip-freq", "4"]
    local = parse([*FLAGS, *flags])
    local_share, global_share = (
        SampledRows(run, rows_at(whole)).load(LENGTH, 4, 1).exchanged for run in (local, config)
    )
    assert global_share / 4 < local_share < global_share / 4 + 0.05
