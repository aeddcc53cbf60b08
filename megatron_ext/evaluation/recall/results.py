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
    """Has a score, of an answer to a sample of a task at a length; samples of one question depend on each other."""

    @property
    def length(self) -> int: ...
    @property
    def task(self) -> str: ...
    @property
    def question(self) -> str: ...
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

    @property
    def question(self) -> str:
        """The sample's own: all samples are drawn apart."""
        return self.sample.prompt

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
    """Compare each model with the first one, question by question: all tasks of a length together, then each task.

    Samples of one question are resampled together, and a model has it wholly right where it has all of them right.
    """
    (first, base), *others = models.items()
    for second, other in others:
        for length in dict.fromkeys(item.length for item in base):
            pairs = [(a, b) for a, b in zip(base, other, strict=True) if a.length == length]
            for task in (ALL_TASKS, *dict.fromkeys(a.task for a, _ in pairs)):
                own = [(a, b) for a, b in pairs if task in (ALL_TASKS, a.task)]
                places = {key: place for place, key in enumerate(dict.fromkeys((a.task, a.question) for a, _ in own))}
                asked = np.array([places[a.task, a.question] for a, _ in own])
                rows = np.bincount(asked).astype(np.float64)
                scores = [np.array([pair[which].score for pair in own]) for which in (0, 1)]
                ours, theirs = (np.bincount(asked, one).astype(np.float64) for one in scores)
                yield {
                    "first": first,
                    "second": second,
                    "length": length,
                    "task": task,
                    "score": difference(ours, theirs, rows).record(),
                    "mcnemar": mcnemar(*(np.bincount(asked, one == 1.0) == rows for one in scores)).record(),
                }


def _by_task(items: Sequence[Scored]) -> dict[str, Float64]:
    scores: dict[str, list[float]] = {}
    for item in items:
        scores.setdefault(item.task, []).append(item.score)
    return {task: np.array(values) for task, values in scores.items()}
