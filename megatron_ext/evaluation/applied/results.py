"""What models answered to applied tasks, and what is made of it: every figure by length and task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.evaluation.applied.sandbox import Verdict
from megatron_ext.evaluation.applied.scoring import (
    Metric,
    Scores,
    answer_scores,
    headed,
    ndcg,
    parse_ranking,
    pass_at_k,
)
from megatron_ext.evaluation.applied.tasks import TASKS, Family, Sample
from megatron_ext.evaluation.recall import results as recall


@dataclass(frozen=True)
class Item:
    """Holds a model's answer to a sample.

    Attributes:
        length: tokens that prompt and answer were to fit.
        sample: what was asked.
        prompt_tokens: of the prompt.
        tokens: that the model wrote; none where options are weighed.
        text: the same as text, or the letter of the likeliest option; of code the greedy program.
        scores: every figure, 0 to 1.
        likelihoods: log-probability of each option, in nats.
        programs, verdicts: the greedy program and those that were drawn, and how each ended.
    """

    length: int
    sample: Sample
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    scores: Scores
    likelihoods: tuple[float, ...] = ()
    programs: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def task(self) -> str:
        """The sample's task."""
        return self.sample.task

    @property
    def question(self) -> str:
        """What is asked, whatever documents it comes with."""
        return self.sample.question

    @property
    def score(self) -> float:
        """The figure by which models are compared."""
        return self.scores[TASKS[self.task].metric]

    def record(self, model: str, number: int) -> dict[str, Any]:
        """Make a line of JSON: item `number` of the model."""
        sample = self.sample
        return {
            "model": model,
            "item": number,
            "length": self.length,
            "task": self.task,
            "answers": [sample.options[sample.gold].strip()] if sample.options else list(sample.answers),
            "prompt_tokens": self.prompt_tokens,
            "kept": sample.kept,
            "pieces": sample.pieces,
            "tokens": list(self.tokens),
            "text": self.text,
            "likelihoods": list(self.likelihoods),
            "programs": list(self.programs),
            "verdicts": [f"{verdict.ending} {verdict.reason}".strip() for verdict in self.verdicts],
            "scores": self.scores,
        }


def cut(text: str, stops: Sequence[str]) -> str:
    """Return what stands before the first of the texts that end an answer."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


def written_scores(sample: Sample, text: str) -> Scores:
    """Score what a model wrote: against answers, or as a ranking."""
    task = TASKS[sample.task]
    if task.family is Family.RANKING:
        return {Metric.NDCG: ndcg(parse_ranking(headed(text, task.heading)), dict(sample.gains))}
    scores = answer_scores(text, sample.answers, task.heading, rouge=task.rouge)
    if task.family is Family.LABELS:
        return {Metric.EXACT_MATCH: scores[Metric.EXACT_MATCH]}
    if task.family is Family.SUMMARY:
        return {name: value for name, value in scores.items() if name.startswith("rouge")}
    return scores


def program_scores(greedy: bool, drawn: Sequence[bool], ks: Sequence[int]) -> Scores:
    """Score programs by whether they passed.

    Args:
        greedy: the likeliest program.
        drawn: the others.
        ks: of pass@k, at most the number of others.
    """
    several = {f"pass@{k} of {len(drawn)}": pass_at_k(len(drawn), sum(drawn), k) for k in ks}
    return {Metric.PASS_AT_1: float(greedy), **several}


def by_length(items: Sequence[Item]) -> dict[str, Any]:
    """Average the figures of a model by length and task.

    In the mean of the main figures every task counts the same, and only those that stand at every length do: the means
    of several lengths are then of the same tasks.
    """
    record = recall.by_length(items)
    everywhere = set.intersection(*(set(at["tasks"]) for at in record.values()))
    for length, at in record.items():
        scores = [told["score"] for task, told in at["tasks"].items() if task in everywhere]
        at["mean"] = float(np.mean(scores))
        for task, told in at["tasks"].items():
            own = [item for item in items if (str(item.length), item.task) == (length, task)]
            told["metric"] = str(TASKS[task].metric)
            told["metrics"] = {name: float(np.mean([item.scores[name] for item in own])) for name in own[0].scores}
            told["kept"] = float(np.mean([item.sample.kept for item in own]))
            told["prompt_tokens"] = float(np.mean([item.prompt_tokens for item in own]))
    return record
