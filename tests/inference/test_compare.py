"""When two models count as the same, by literal numbers; tests/tools/test_convert_checkpoint.py compares real ones."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.inference.compare import Comparison

SAME = Comparison(9e-4, 9e-5, 10.0, (2.0, 2.000009), ([1], [1]), "float32")


@pytest.mark.parametrize(
    "beyond",
    [
        {"largest": 1.1e-3},
        {"mean": 1.1e-4},
        {"losses": (2.0, 2.000011)},
        {"greedy": ([1], [2])},
        {"largest": float("nan")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_bound_counts(beyond: dict[str, Any]) -> None:
    assert SAME.agrees
    assert not replace(SAME, **beyond).agrees


def test_in_bf16_greedy_tokens_may_differ() -> None:
    assert replace(SAME, greedy=([1], [2]), dtype="bfloat16").agrees
