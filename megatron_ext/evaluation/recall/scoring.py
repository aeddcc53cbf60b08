"""How an answer is scored: as RULER, HELMET and Lost in the Middle do, each in its own way."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from enum import StrEnum

_CONTROL = re.compile(r"[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Metric(StrEnum):
    """Names a way of scoring.

    ALL: the share of the answers that the text holds (RULER). PART: whether it holds one of them (RULER's question
    answering). SUBSPAN: whether it holds one when both are normalised, in the whole text or in its first line after
    the prompt's heading (HELMET). FIRST_LINE: the same in the first line alone (Lost in the Middle).
    """

    ALL = "all"
    PART = "part"
    SUBSPAN = "subspan"
    FIRST_LINE = "first_line"


def score(metric: Metric, text: str, answers: Sequence[str]) -> float:
    """Score what a model wrote against the answers; 0 to 1."""
    if metric in (Metric.ALL, Metric.PART):
        cleaned = _CONTROL.sub("\n", text.strip()).lower()
        found = [answer.lower() in cleaned for answer in answers]
        return sum(found) / len(found) if metric is Metric.ALL else float(any(found))
    looked_at = text if metric is Metric.SUBSPAN else text.strip().split("\n")[0]
    normal = normalised(looked_at)
    return float(any(normalised(answer) in normal for answer in answers))


def normalised(text: str) -> str:
    """Lower a text's case, and take punctuation, articles and double spaces off."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
