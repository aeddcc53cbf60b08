"""Losses by position against a loop; differences of two models with their intervals."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.evaluation.by_position import losses_by_position, mean_loss, sums_by_position
from megatron_ext.evaluation.report import difference, markdown, write_record

edges = st.integers(0, 22).flatmap(lambda power: st.sampled_from([2**power - 1, 2**power, 2**power - 2]))
tokens = st.lists(st.tuples(st.floats(0, 20, width=32), edges.map(lambda p: max(p, 0)), st.booleans()), min_size=1)


@given(found=tokens, cut=st.integers(0, 10))
def test_bins_are_means_over_powers_of_two(found: list[tuple[float, int, bool]], cut: int) -> None:
    """An untrained token may have any loss."""

    def summed(part: list[tuple[float, int, bool]]) -> torch.Tensor:
        loss, position, trained = zip(*part, strict=True) if part else ((), (), ())
        counts = torch.tensor(trained, dtype=torch.bool)
        losses = torch.tensor(loss, dtype=torch.float32).where(counts, torch.nan)
        return sums_by_position(losses, torch.tensor(position, dtype=torch.int32), counts)

    sums = summed(found[:cut]) + summed(found[cut:])
    bins = defaultdict(list)
    for loss, position, trained in found:
        if trained:
            bins[2 ** int(math.log2(position + 1) + 1e-12)].append(loss)
    assert losses_by_position(sums) == pytest.approx(
        {low: sum(bin_losses) / len(bin_losses) for low, bin_losses in bins.items()}
    )
    every = [loss for bin_losses in bins.values() for loss in bin_losses]
    assert mean_loss(sums) == (pytest.approx(sum(every) / len(every)) if every else None)


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Differences of known mean and weight: of 100 samples, about 95 intervals hold it."""
    draw = np.random.default_rng(0)
    held = 0
    for number in range(100):
        weights = draw.integers(50, 200, 60).astype(float)
        first = draw.normal(3.0, 0.5, 60) * weights
        second = first + draw.normal(0.1, 0.3, 60) * weights
        interval = difference(first, second, weights, seed=number)
        assert interval["value"] == pytest.approx((second - first).sum() / weights.sum())
        held += interval["low"] <= 0.1 <= interval["high"]
    assert 85 <= held <= 99


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    """JSON has no NaN; the tables show it."""
    result = {"model": "a", "task": "all", "metric": "loss", "value": math.nan, "length": 8}
    record = {"kind": "perplexity", "settings": {}, "results": [result], "differences": []}
    write_record(record, {}, tmp_path)
    read = json.loads((tmp_path / "perplexity.json").read_text(), parse_constant=pytest.fail)
    assert read["results"][0]["value"] is None
    assert "nan" in markdown(record)
    assert markdown(read) == markdown(record)


def test_one_item_has_no_interval() -> None:
    interval = difference(np.array([1.0]), np.array([3.0]), np.array([4.0]))
    assert interval == {"value": 0.5, "low": None, "high": None}
