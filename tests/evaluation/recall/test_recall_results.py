"""Scores by task and length, and differences between models, of made-up answers."""

from __future__ import annotations

import pytest

from megatron_ext.evaluation.recall.results import Item, by_length, differences
from megatron_ext.evaluation.recall.sample import Sample
from megatron_ext.evaluation.recall.scoring import Metric

SCORES = {"first": {"vt": [1.0, 0.6, 0.2], "cwe": [0.5]}, "second": {"vt": [1.0, 1.0, 1.0], "cwe": [1.0]}}


def items(model: str, length: int) -> list[Item]:
    return [
        Item(length, Sample(task, f"sample {number}", ("a",), 1, Metric.ALL), 1, (1,), "", score)
        for task, scores in SCORES[model].items()
        for number, score in enumerate(scores)
    ]


def test_every_task_counts_the_same_in_the_mean() -> None:
    record = by_length([*items("first", 64), *items("second", 128)])
    assert record["64"]["tasks"]["vt"] == {"score": pytest.approx(0.6), "samples": 3}
    assert record["64"]["mean"] == pytest.approx(0.55)
    assert record["128"]["mean"] == 1.0


def test_models_are_compared_sample_by_sample() -> None:
    pytest.importorskip("scipy")
    models = {name: items(name, 64) for name in SCORES}
    told = {pair["task"]: pair for pair in differences(models)}
    assert list(told) == ["all", "vt", "cwe"]
    assert told["all"]["score"]["value"] == pytest.approx((0 + 0.4 + 0.8 + 0.5) / 4)
    assert told["vt"]["score"]["low"] >= 0
    assert told["vt"]["mcnemar"] == {"only_first": 0, "only_second": 2, "p_value": pytest.approx(0.5)}
    assert told["cwe"]["score"]["low"] is None
