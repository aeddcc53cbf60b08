"""What models answered, and what is made of it: scores by task and length, and differences between models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_ext.arrays import Float64
from megatron_ext.evaluation.recall.sample import Sample
from megatron_ext.evaluation.statistics import difference, mcnemar

ALL_TASKS = "all"


class Scored(Protocol):
    """Has a score, of an answer to a sample of a task at a length."""

    @property
    def length(self) -> int: ...
    @property
    def task(self) -> str: ...
    @property
    def score(self) -> float: ...


@dataclass(frozen=True)
class Item:
    """Holds a model's answer to a sample.

    Attributes:
        length: tokens that the sample was to fill.
        sample: what was asked.
        prompt_tokens: of the prompt.
        tokens: that the model wrote.
        text: the same as text.
        score: 0 to 1.
    """

    length: int
    sample: Sample
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    score: float

    @property
    def task(self) -> str:
        """The sample's task."""
        return self.sample.task

    def record(self, model: str, number: int) -> dict[str, Any]:
        """Make a line of JSON: item `number` of the model."""
        return {
            "model": model,
            "item": number,
            "length": self.length,
            "task": self.task,
            "answers": list(self.sample.answers),
            "prompt_tokens": self.prompt_tokens,
            "tokens": list(self.tokens),
            "text": self.text,
            "score": self.score,
        }


def by_length(items: Sequence[Scored]) -> dict[str, Any]:
    """Average the scores of a model by length and task; every task counts the same in the mean."""
    record: dict[str, Any] = {}
    for length in dict.fromkeys(item.length for item in items):
        own = [item for item in items if item.length == length]
        tasks = {
            task: {"score": float(scores.mean()), "samples": len(scores)} for task, scores in _by_task(own).items()
        }
        record[str(length)] = {"mean": float(np.mean([at["score"] for at in tasks.values()])), "tasks": tasks}
    return record


def differences(models: Mapping[str, Sequence[Scored]]) -> Iterator[dict[str, Any]]:
    """Compare each model with the first one, sample by sample: all tasks of a length together, then each task."""
    (first, base), *others = models.items()
    for second, other in others:
        for length in dict.fromkeys(item.length for item in base):
            pairs = [(a, b) for a, b in zip(base, other, strict=True) if a.length == length]
            ours, theirs = (_by_task([pair[which] for pair in pairs]) for which in (0, 1))
            for task in (ALL_TASKS, *ours):
                a, b = (np.concatenate(list(by.values())) if task == ALL_TASKS else by[task] for by in (ours, theirs))
                yield {
                    "first": first,
                    "second": second,
                    "length": length,
                    "task": task,
                    "score": difference(a, b).record(),
                    "mcnemar": mcnemar(a == 1.0, b == 1.0).record(),
                }


def _by_task(items: Sequence[Scored]) -> dict[str, Float64]:
    scores: dict[str, list[float]] = {}
    for item in items:
        scores.setdefault(item.task, []).append(item.score)
    return {task: np.array(values) for task, values in scores.items()}
