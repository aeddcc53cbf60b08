"""Losses by position against a loop."""

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.evaluation.by_position import losses_by_position, mean_loss, sums_by_position

edges = st.integers(0, 22).flatmap(lambda power: st.sampled_from([2**power - 1, 2**power, 2**power - 2]))
tokens = st.lists(st.tuples(st.floats(0, 20, width=32), edges.map(lambda p: max(p, 0)), st.booleans()), min_size=1)


@given(found=tokens, cut=st.integers(0, 10))
def test_bins_are_means_over_powers_of_two(found: list[tuple[float, int, bool]], cut: int) -> None:
    def summed(part: list[tuple[float, int, bool]]) -> torch.Tensor:
        loss, position, trained = zip(*part, strict=True) if part else ((), (), ())
        return sums_by_position(
            torch.tensor(loss, dtype=torch.float32),
            torch.tensor(position, dtype=torch.int32),
            torch.tensor(trained, dtype=torch.bool),
        )

    sums = summed(found[:cut]) + summed(found[cut:])
    bins = defaultdict(list)
    for loss, position, trained in found:
        if trained:
            bins[2 ** int(math.log2(position + 1) + 1e-12)].append(loss)
    assert losses_by_position(sums) == pytest.approx({low: sum(some) / len(some) for low, some in bins.items()})
    every = [loss for some in bins.values() for loss in some]
    assert mean_loss(sums) == (pytest.approx(sum(every) / len(every)) if every else None)


def test_an_untrained_token_may_have_any_loss() -> None:
    sums = sums_by_position(torch.tensor([torch.nan, 2.0]), torch.tensor([0, 0]), torch.tensor([False, True]))
    assert losses_by_position(sums) == {1: 2.0}
