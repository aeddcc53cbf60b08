"""Answers are scored as the benchmarks score them: worked examples."""

from __future__ import annotations

import pytest

from megatron_ext.evaluation.recall.scoring import Metric, score


@pytest.mark.parametrize(
    ("metric", "text", "answers", "wanted"),
    [
        (Metric.ALL, " 1234567, and 7654321.", ["1234567", "7654321", "1111111", "2222222"], 0.5),
        (Metric.ALL, "ABC\x00DE fgh", ["abc", "FGH"], 1.0),
        (Metric.ALL, "12345678", ["1234567"], 1.0),
        (Metric.ALL, "", ["a"], 0.0),
        (Metric.PART, "in the city of paris", ["London", "Paris"], 1.0),
        (Metric.PART, "pari s", ["Paris"], 0.0),
        (Metric.PART, "paris", ["the Paris"], 0.0),
        (Metric.SUBSPAN, "no\nthe big, dog!", ["a big dog"], 1.0),
        (Metric.SUBSPAN, "cat", ["dog"], 0.0),
        (Metric.FIRST_LINE, "\n no\nthe big dog", ["big dog"], 0.0),
        (Metric.FIRST_LINE, " It is The  Big-Dog.\nno", ["bigdog"], 1.0),
    ],
)
def test_scores(metric: Metric, text: str, answers: list[str], wanted: float) -> None:
    assert score(metric, text, answers) == wanted
