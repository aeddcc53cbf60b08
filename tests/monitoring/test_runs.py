import json
import os

import numpy as np
import pytest

from megatron_ext.monitoring.metrics import note_history, stage_folders
from megatron_ext.monitoring.report import charts, load_run, load_runs, loss_difference, parts, stability, table

from .records import evaluation_record, step_record, write_run


def _write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_second_evaluation_of_a_step_replaces_the_first(tmp_path):
    write_run(tmp_path, 3)
    _write(tmp_path / "evaluation.jsonl", [evaluation_record(2, 5.0), evaluation_record(2, 4.0)])
    assert load_run(tmp_path).validation["valid_loss"].values.tolist() == [4.0]


def test_a_step_without_trained_tokens_has_no_loss(tmp_path):
    records = [step_record(step) for step in range(30)]
    empty = {"denominator": 0.0, "lm_loss": 0.0, "train_loss": 0.0, "grad_norm": 0.0, "skipped": 1}
    _write(tmp_path / "metrics.jsonl", [*records[:12], records[12] | empty, *records[13:]])
    run = load_run(tmp_path)
    assert run.curve("lm_loss").values.tolist() == [record["lm_loss"] for record in records if record["step"] != 12]
    assert table(run)["Non-finite steps"] == "0"


def test_differences_are_effect_sizes_with_their_spread_over_steps(tmp_path):
    noise = np.random.default_rng(0).normal(size=(2, 200))
    runs = []
    for name, shift in (("base", 0.0), ("better", -0.05)):
        common = 3.0 + 0.5 * noise[0]  # what the rows of a step have in common
        losses = common + shift + (0.02 * noise[1] if shift else 0.0)
        _write(tmp_path / name / "metrics.jsonl", [step_record(s, lm_loss=loss) for s, loss in enumerate(losses)])
        runs.append(tmp_path / name)
    last = noise[1, 180:]
    found = loss_difference(*load_runs(runs))
    assert found == pytest.approx((-0.05 + 0.02 * last.mean(), 0.02 * last.std(ddof=1)))
    assert loss_difference(*load_runs([runs[0], write_run(tmp_path / "short", 19)])) is None


def test_the_four_stability_figures():
    ratio = (5 * 3.0 + 4 * 1.0) / 9
    assert list(stability([1.0, 3.0] * 5, [0.5, 2.0]).values()) == [1.0, 2.0, ratio, 0.75]
    # t = 10: nine 0 and a 1 -> sqrt(0.1 * 0.9) = 0.3; t = 11: eight 0 and two 1 -> sqrt(0.2 * 0.8) = 0.4.
    assert stability([1.0] * 9 + [2.0, 2.0], [1.0])["volatility"] == pytest.approx((0.3 + 0.4) / 2)


def test_stages_are_ordered_by_the_recorded_time(tmp_path):
    """Copying a folder changes the times of files."""
    for number, name in enumerate(("short", "long", "longer")):
        metrics = tmp_path / name / "metrics.jsonl"
        _write(metrics, [step_record(step, time=1000.0 * number + step) for step in range(3)])
        os.utime(metrics, (100.0 - number, 100.0 - number))
    assert [folder.name for folder in stage_folders(tmp_path)] == ["short", "long", "longer"]
    assert stage_folders(tmp_path / "short") == []


SOURCES = {"books": {"share": 0.75, "row_tokens": 1000.0}, "code": {"share": 0.25, "row_tokens": 500.0}}


def test_the_shares_of_a_mixture_are_of_tokens_and_add_up_over_the_run(tmp_path):
    rows = [{"books": 3, "code": 1}] * 10 + [{"books": 1, "code": 3}] * 10
    _write(tmp_path / "metrics.jsonl", [step_record(step, source_rows=drawn) for step, drawn in enumerate(rows)])
    facts = {"host": "h", "devices": "d", "processes": 1, "layout": "TP 1", "command": "c", "parameters": 1}
    note_history(tmp_path, "start", 0, facts | {"sources": SOURCES})
    books, requested, code, _ = charts([load_run(tmp_path)])[f"Mixture as drawn by {tmp_path.name}"].data
    assert [books.name, requested.name, code.name] == ["books", "books, requested", "code"]
    assert list(requested.y) == [0.75, 0.75]
    assert [books.y[0], code.y[0]] == pytest.approx([3000 / 3500, 500 / 3500])
    assert [books.y[-1], code.y[-1]] == pytest.approx([2 / 3, 1 / 3])


def test_a_length_may_be_evaluated_later_than_others(tmp_path):
    write_run(tmp_path, 3)
    later = evaluation_record(2, 3.0, by_length={"1024": 2.5, "128": 3.0})
    _write(tmp_path / "evaluation.jsonl", [evaluation_record(0, 5.0), later])
    run = load_run(tmp_path)
    curves = parts(run.validation, "by_length")
    assert [curve.tolist() for curve in curves["128"]] == [[2.0], [3.0]]
    assert [curve.tolist() for curve in curves["1024"]] == [[0.0, 2.0], [5.0, 2.5]]
    rows = [label for label in table(run) if label.startswith("Validation")]
    assert rows == ["Validation loss at 128 tokens", "Validation loss at 1,024 tokens"]
