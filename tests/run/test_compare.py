"""When two models count as the same, by literal numbers; tests/tools/test_convert_checkpoint.py compares real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.run import compare
from megatron_ext.run.compare import TOLERANCES, Answers, Comparison

FLOAT32 = Comparison(
    largest=9e-4,
    mean=9e-5,
    scale=10.0,
    losses=(2.0, 2.000009),
    greedy=([1, 2], [1, 2]),
    tolerance=TOLERANCES[torch.float32],
)
BFLOAT16 = replace(
    FLOAT32, largest=0.9, mean=0.09, losses=(2.0, 2.019), greedy=([1], [2]), tolerance=TOLERANCES[torch.bfloat16]
)


def test_what_stays_below_every_bound_agrees() -> None:
    assert FLOAT32.agrees
    assert BFLOAT16.agrees  # a near tie may fall either way


@pytest.mark.parametrize("near", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("field", ["largest", "mean"])
def test_logits_are_bounded_relative_to_the_largest(near: Comparison, field: str) -> None:
    beyond = replace(near, **{field: 1.2 * getattr(near, field)})
    assert not beyond.agrees
    assert replace(beyond, scale=1.2 * near.scale).agrees


@pytest.mark.parametrize(("near", "loss"), [(FLOAT32, 2.000011), (BFLOAT16, 1.979)], ids=["float32", "bfloat16"])
def test_losses_are_bounded(near: Comparison, loss: float) -> None:
    assert not replace(near, losses=(2.0, loss)).agrees


def test_in_float32_the_texts_go_on_alike() -> None:
    assert not replace(FLOAT32, greedy=([1, 2], [1, 3])).agrees


@pytest.mark.parametrize("field", ["largest", "mean"])
def test_what_is_not_finite_never_agrees(field: str) -> None:
    assert not replace(FLOAT32, **{field: float("nan")}).agrees


def answers(vocabulary: int, spread: float) -> Answers:
    return Answers(2.0, spread * torch.arange(3 * vocabulary, dtype=torch.float32).reshape(3, vocabulary), [7])


def test_differences_are_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "transformers_answers", lambda *_: answers(4, 1.0))
    monkeypatch.setattr(compare, "megatron_answers", lambda *_: answers(4, 1.5))
    compared = compare.compare(Path("theirs"), Path("ours"), [1, 2, 3, 4], torch.float32, 1)
    assert (compared.largest, compared.mean, compared.scale) == (5.5, 2.75, 11.0)
    assert not compared.agrees
    monkeypatch.setattr(compare, "megatron_answers", lambda *_: answers(5, 1.0))
    with pytest.raises(UserError, match="the models know 4 and 5 token ids"):
        compare.compare(Path("theirs"), Path("ours"), [1, 2, 3, 4], torch.float32, 1)


def test_a_text_goes_on_by_its_likeliest_token() -> None:
    """The model of this test says the successor of the last token; it gets the whole text each time."""
    texts = []

    def logits(ids: list[int]) -> torch.Tensor:
        texts.append(list(ids))
        return torch.nn.functional.one_hot(torch.tensor(ids) + 1, 10).float()

    assert compare._continue(logits, [5, 2], 3) == [3, 4, 5]
    assert texts == [[5, 2], [5, 2, 3], [5, 2, 3, 4]]
