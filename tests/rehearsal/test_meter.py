"""What is counted in a rehearsal: storages of real tensors, and pairs of attention."""

import gc

import numpy as np
import pytest
import torch

from megatron_ext.rehearsal.memory import Part
from megatron_ext.rehearsal.meter import Meter, segment_pairs


def meter() -> Meter:
    return Meter("cpu", (1, 1, 1, 1))


def test_bytes_and_peak_of_known_allocations() -> None:
    with meter() as counted:
        kept = torch.zeros(1000)
        with_view = torch.ones(10, 10, dtype=torch.bfloat16)
        view = with_view.T[2:]
        total = 4000 + 200
        assert counted.allocations.total == total
        temporary = torch.zeros(500) + 1.0  # two of 2,000 bytes at once
        del temporary, with_view
        assert counted.allocations.total == total  # the view keeps the storage
        assert counted.allocations.peak.total == total + 4000
        del view
        kept.add_(1.0)
        assert counted.allocations.total == 4000
        kept.untyped_storage().resize_(0)
        assert counted.allocations.total == 0
        kept.untyped_storage().resize_(800)
        assert counted.allocations.total == 800
    assert counted.allocations.peak.parts[Part.OTHER] == total + 4000


def test_scratch_counts_for_the_peak_alone() -> None:
    with meter() as counted:
        x = torch.zeros(100)
    counted.allocations.transient(1000, "a kernel")
    assert counted.allocations.total == 400
    assert counted.allocations.peak.total == 1400
    assert counted.allocations.peak.site == "a kernel"
    counted.allocations.reset_peak()
    assert counted.allocations.peak.total == x.nbytes


def test_circles_of_references_keep_their_storage() -> None:
    gc.disable()
    try:
        with meter() as counted:
            circle: list[object] = [torch.zeros(100)]
            circle.append(circle)
            del circle
            assert counted.allocations.total == 400
            gc.collect()
            assert counted.allocations.total == 0
    finally:
        gc.enable()


def seen(queries: int, keys: int, left_window: int) -> int:
    """Pairs of one segment, causal from the bottom right."""
    query = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None]
    return int(((key <= query) & (key >= query - left_window)).sum())


@pytest.mark.parametrize("left_window", [None, 0, 1, 3, 100])
def test_pairs_are_those_of_a_dense_mask(left_window: int | None) -> None:
    rng = np.random.default_rng(0)
    queries = rng.integers(0, 9, size=40)
    keys = queries + rng.integers(0, 9, size=40)
    borders = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in (queries, keys)]
    wanted = sum(seen(q, k, 100 if left_window is None else left_window) for q, k in zip(queries, keys, strict=True))
    assert segment_pairs(borders[0], borders[1], left_window) == wanted
