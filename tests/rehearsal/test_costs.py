"""What attention costs by its borders, against a dense mask."""

import numpy as np
import pytest

from megatron_ext.planning.memory import flash_backward_scratch
from megatron_ext.rehearsal.meter import segment_pairs


def seen(queries: int, keys: int, left: int) -> int:
    """Pairs of one segment, causal from the bottom right."""
    query, key = np.arange(queries)[:, None] + keys - queries, np.arange(keys)[None]
    return int(((key <= query) & (key >= query - left)).sum())


@pytest.mark.parametrize("left", [None, 0, 1, 3, 100])
def test_pairs_are_those_of_a_dense_mask(left: int | None) -> None:
    rng = np.random.default_rng(0)
    queries = rng.integers(0, 9, size=40)
    keys = queries + rng.integers(0, 9, size=40)
    borders = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in (queries, keys)]
    wanted = sum(seen(q, k, 100 if left is None else left) for q, k in zip(queries, keys, strict=True))
    assert segment_pairs(borders[0], borders[1], left) == wanted


def test_scratch_of_a_known_case() -> None:
    """8B in rows of 128K, window 8, on one GPU (32 heads of 128): 128 (t / 8) rows more than the t that there are."""
    t, segments = 2**17, 2**14
    rows = t + 128 * segments
    assert flash_backward_scratch(t, t, segments, 32, 32, 128, 2) == 4 * rows * 32 * 129
    assert flash_backward_scratch(t, t, 1, 32, 8, 128, 2) == 4 * (t + 128) * 32 * 129 + 2 * t * 32 * 128 * 2
    assert flash_backward_scratch(t, t, 1, 4, 4, 80, 2) == 4 * (t + 128) * 4 * 97  # heads of 80 are padded to 96
