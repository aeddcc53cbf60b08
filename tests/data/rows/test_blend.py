"""BlendedRows against a sorted list of events."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.rows.blend import BlendedRows
from megatron_ext.data.rows.dataset import RowDataset
from tests.data.packing.sources import ListedSource


def make(lengths: list[int], row_length: int, seed: int = 0) -> RowDataset:
    return RowDataset(ListedSource(lengths), range(len(lengths)), row_length, seed)


def blend(weights: list[float]) -> BlendedRows:
    return BlendedRows([make([7, 5], 4, seed) for seed in range(len(weights))], weights)


weird_weights = st.lists(
    st.one_of(st.floats(1e-9, 1e9), st.sampled_from([1e-12, 0.1, 0.2, 0.3, 1 / 3, 0.5, 1.0, 2.0, math.pi, 1e12])),
    min_size=1,
    max_size=6,
)


@given(weights=weird_weights)
@settings(max_examples=150, deadline=None)
def test_blend_equals_the_sorted_events(weights: list[float]) -> None:
    rows, count = blend(weights), 60
    events = [((k + 0.5) / w, d, k) for d, w in enumerate(rows.weights) for k in range(count)]
    expected = [(d, k) for _, d, k in sorted(events)[:count]]
    assert [rows.locate(sample) for sample in range(count)] == expected
    for samples in (0, 1, 7, count):
        counted = Counter(d for d, _ in expected[:samples])
        assert rows.drawn(samples) == tuple(counted[d] for d in range(len(weights)))


@given(weights=weird_weights, start=st.sampled_from([0, 1, 999, 10**6, 10**9, 10**12, 10**15]))
@settings(max_examples=150, deadline=None)
def test_blend_reads_each_dataset_in_order_and_in_proportion(weights: list[float], start: int) -> None:
    rows = blend(weights)
    drawn: dict[int, int] = {}
    for sample in range(start, start + 50):
        dataset, number = rows.locate(sample)
        if start == 0 or dataset in drawn:
            assert number == drawn.get(dataset, 0)
        drawn[dataset] = number + 1
        share = rows.weights[dataset]
        bound = (1 + share * max(0, len(weights) - 2)) / 2
        assert abs(drawn[dataset] - (sample + 1) * share) <= bound + 1e-3 + 1e-15 * start


def test_a_tiny_weight_is_never_drawn() -> None:
    assert BlendedRows([make([5], 4), make([5], 4)], [1.0, 1e-200]).locate(5) == (0, 5)
