"""When two models count as the same, by literal numbers; tests/tools/test_convert_checkpoint.py compares real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.run import compare
from megatron_ext.run.compare import Comparison

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


def test_differences_are_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, spread in (("transformers_answers", 1.0), ("megatron_answers", 1.5)):
        logits = spread * torch.arange(12, dtype=torch.float32).reshape(3, 4)
        monkeypatch.setattr(compare, name, lambda *_, answer=(2.0, logits, [7]): answer)
    compared = compare.compare(Path("theirs"), Path("ours"), [1, 2, 3, 4], "float32", 1)
    assert (compared.largest, compared.mean, compared.scale) == (5.5, 2.75, 11.0)
    assert not compared.agrees
