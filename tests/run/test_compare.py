"""When two models count as the same, by literal numbers; tests/tools/test_convert_checkpoint.py compares real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.run import compare
from megatron_ext.run.compare import Answers, Comparison

SAME = Comparison(9e-4, 9e-5, 10.0, (2.0, 2.000009), ([1], [1]), allowed=(1e-3, 1e-4, 1e-5), exact=True)


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


def test_in_bf16_a_near_tie_may_fall_either_way() -> None:
    assert replace(SAME, greedy=([1], [2]), exact=False).agrees


def answers(vocabulary: int, spread: float) -> Answers:
    return 2.0, spread * torch.arange(3 * vocabulary, dtype=torch.float32).reshape(3, vocabulary), [7]


def test_differences_are_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "transformers_answers", lambda *_: answers(4, 1.0))
    monkeypatch.setattr(compare, "megatron_answers", lambda *_: answers(4, 1.5))
    compared = compare.compare(Path("theirs"), Path("ours"), [1, 2, 3, 4], torch.float32, 1)
    assert (compared.largest, compared.mean, compared.scale) == (5.5, 2.75, 11.0)
    assert not compared.agrees
    monkeypatch.setattr(compare, "megatron_answers", lambda *_: answers(5, 1.0))
    with pytest.raises(UserError, match="the models know 4 and 5 token ids"):
        compare.compare(Path("theirs"), Path("ours"), [1, 2, 3, 4], torch.float32, 1)
