"""Effective context, imbalance and exchange of sampled rows, against the code that training uses."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.context_parallel.choice import planned_cp
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


def quarters(sample: int) -> np.ndarray:
    return np.arange(1, 5) * LENGTH // 4


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
    assert rows.load(window, None, 1).context == pytest.approx(config.mask_options().whole_row_context(LENGTH, window))
    assert rows.load(window, None, 4).imbalance == pytest.approx(1.0)


def test_the_context_is_the_mean_of_squared_document_lengths(config: Config) -> None:
    rows = SampledRows(config, rows_at(lambda sample: np.array([1024])))
    assert rows.load(LENGTH, None, 1).context == pytest.approx((1024**2 + 3072**2) / LENGTH)
    assert rows.load(1024, None, 1).context == pytest.approx(1024)


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
    assert rows.load(LENGTH, None, replicas).imbalance == pytest.approx(np.mean(worst), rel=0.06)
    in_order = SampledRows(config, rows_at(drawn)).load(LENGTH, None, replicas).imbalance
    assert in_order >= rows.load(LENGTH, None, replicas).imbalance * (1 - 1e-9)


def test_ranks_exchange_tokens_for_heads_where_that_moves_less() -> None:
    """Of rows of one document with 4 query and 4 key heads; short documents are on one rank, and nothing moves."""
    flags = [*FLAGS, "--num-query-groups", "4", "--context-parallel-size", "4"]
    loads = {
        (scheme, of): SampledRows(run, rows_at(of)).load(LENGTH, planned_cp(run), 1)
        for scheme in ("exchange", "ulysses", "auto")
        for run in [parse([*flags, "--cp-scheme", scheme])]
        for of in (whole, quarters)
    }
    assert loads["exchange", whole].ulysses == 0 < loads["exchange", whole].exchanged
    assert loads["ulysses", whole][1:] == (0, 1, 1)
    assert loads["auto", whole] == loads["ulysses", whole]
    assert loads["auto", quarters][1:] == loads["exchange", quarters][1:] == (0, 0, 1)


def test_local_layers_exchange_their_window_alone() -> None:
    cp4 = [*FLAGS, "--context-parallel-size", "4", "--cp-scheme", "exchange"]
    local = [*cp4, "--num-layers", "4", "--local-window", "64", "--window-attn-skip-freq", "4"]
    local_share, global_share = (
        SampledRows(run, rows_at(whole)).load(LENGTH, planned_cp(run), 1).exchanged for run in map(parse, (local, cp4))
    )
    assert global_share / 4 < local_share < global_share / 4 + 0.05
