from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megatron_ext.errors import UserError
from megatron_ext.monitoring.runs import _t_975, load_run, load_runs, summarise
from megatron_ext.monitoring.stability import stability

from .records import evaluation_record, step_record, write_run


def _write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_summary_of_a_run_by_hand(tmp_path):
    records = [
        step_record(0, lm_loss=4.0, grad_norm=3.0, window=32, tokens_per_s=10.0, step_time_s=2.0),
        step_record(1, lm_loss=3.0, grad_norm=0.5, window=64, tokens_per_s=40.0, step_time_s=0.5),
        step_record(2, lm_loss=2.0, grad_norm=0.1, window=128, tokens_per_s=30.0, step_time_s=0.5),
    ]
    _write(tmp_path / "run" / "metrics.jsonl", records)
    losses = {0: 4.5, 2: 2.25, 3: 2.5}
    _write(tmp_path / "run" / "evaluation.jsonl", [evaluation_record(*item) for item in losses.items()])
    run = load_run(tmp_path / "run")
    summary = summarise(run)
    assert run.name == "run"
    assert (summary.first_step, summary.completed_steps, summary.missing_steps) == (0, 3, 0)
    assert (summary.tokens, summary.seconds, summary.median_tokens_per_s) == (12288.0, 3.0, 30.0)
    assert (summary.window_start, summary.window_end) == (32.0, 128.0)
    assert (summary.initial_train_loss, summary.final_train_loss) == (4.0, 2.0)
    assert summary.initial_validation == (0, 4.5)
    assert summary.best_validation == (2, 2.25)
    assert summary.final_validation == (3, 2.5)
    assert summary.peak_memory_bytes == 3 * 2**30
    assert summary.stability.smoothness == 1.0
    assert summary.stability.gradient_norm == pytest.approx((1.0 + 0.5 + 0.1) / 3)


def test_a_second_evaluation_of_a_step_replaces_the_first(tmp_path):
    write_run(tmp_path, 3)
    _write(tmp_path / "evaluation.jsonl", [evaluation_record(2, 5.0), evaluation_record(2, 4.0)])
    assert load_run(tmp_path).validation().values.tolist() == [4.0]


def test_non_finite_steps_are_counted_and_left_out_of_the_stability(tmp_path):
    records = [step_record(step) for step in range(20)]
    records[7]["lm_loss"] = None
    records[9]["grad_norm"] = None
    _write(tmp_path / "metrics.jsonl", records)
    summary = summarise(load_run(tmp_path))
    good = [record for record in records if record["step"] not in (7, 9)]
    expected = stability([record["lm_loss"] for record in good], [record["grad_norm"] for record in good])
    assert summary.non_finite_steps == 2
    assert summary.stability == expected


def test_a_gap_in_the_steps_is_counted(tmp_path):
    _write(tmp_path / "metrics.jsonl", [step_record(step) for step in (5, 6, 9)])
    summary = summarise(load_run(tmp_path))
    assert (summary.first_step, summary.completed_steps, summary.missing_steps) == (5, 10, 2)


def test_a_step_without_trained_tokens_has_no_loss(tmp_path):
    losses = [step_record(step) for step in range(30)]
    empty = {"denominator": 0.0, "lm_loss": 0.0, "train_loss": 0.0, "grad_norm": 0.0, "skipped": 1}
    _write(tmp_path / "metrics.jsonl", [*losses[:12], losses[12] | empty, *losses[13:29], losses[29] | empty])
    run = load_run(tmp_path)
    summary = summarise(run)
    assert (summary.non_finite_steps, summary.skipped_steps) == (0, 2)
    assert summary.final_train_loss == losses[28]["lm_loss"]
    assert run.curve("lm_loss").finite().values.min() > 0
    rest = [record for step, record in enumerate(losses) if step not in (12, 29)]
    assert summary.stability == stability(
        [record["lm_loss"] for record in rest], [record["grad_norm"] for record in rest]
    )


@given(st.integers(4, 400))
def test_the_interval_of_few_steps_is_students(freedom):
    assert _t_975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=3e-3)


def test_validation_by_length_is_sorted_by_number_and_may_begin_later(tmp_path):
    write_run(tmp_path, 3)
    later = evaluation_record(2, 3.0, by_length={"1024": 2.5, "128": 3.0})
    _write(tmp_path / "evaluation.jsonl", [evaluation_record(0, 5.0), later])
    curves = load_run(tmp_path).validation_by_length()
    assert list(curves) == [128, 1024]
    assert np.isnan(curves[128].values[0])
    assert curves[128].finite().steps.tolist() == [2.0]
    assert curves[128].finite().values.tolist() == [3.0]


def test_a_half_written_last_step_is_left_out(tmp_path):
    write_run(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lm_')
    assert len(load_run(tmp_path).records) == 3


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: not found, .* --save"):
        load_run(tmp_path)


@pytest.mark.parametrize("content", ["", '{"step": 0'])
def test_a_file_without_a_whole_step_is_refused_and_with_one_it_is_not(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl: holds no complete step, .* train a step first"):
        load_run(tmp_path)
    path.write_text(json.dumps(step_record(0)))
    assert len(load_run(tmp_path).records) == 1


def test_a_record_without_a_step_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"lm_loss": 2.0}\n')
    with pytest.raises(UserError, match="`step` is None, needs an integer"):
        load_run(tmp_path)


def test_runs_are_named_by_the_shortest_end_of_their_paths_that_differs(tmp_path):
    folders = [write_run(tmp_path / group / "run", 1) for group in ("a", "b")]
    assert [run.name for run in load_runs(folders)] == ["a/run", "b/run"]
    other = write_run(tmp_path / "a" / "other", 1)
    assert [run.name for run in load_runs([folders[0], other])] == ["run", "other"]


def test_the_same_run_twice_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", 1)
    with pytest.raises(UserError, match="given twice"):
        load_runs([folder, folder / ".." / "run"])
