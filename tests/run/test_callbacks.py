"""A run's records: a line for each step, and messages that are logged once; which losses are spikes."""

import json
import math
import signal
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.attention.health import AttentionHealth
from megatron_ext.checkpoint.history import read_history
from megatron_ext.config import Config, DataConfig, LoggingConfig, TrainingConfig, WeightingConfig
from megatron_ext.engine.step import Outcome, StepResult
from megatron_ext.errors import DivergedError
from megatron_ext.files.jsonl import read_jsonl
from megatron_ext.loss import LossTerms
from megatron_ext.run.callbacks import Incidents, RunInfo, RunRecords, StepRecord, spike_bound
from megatron_ext.run.signals import DIVERGED, Ending

SUMS = {"weighted_sum": 12.0, "loss_sum": 8.0, "token_count": 4.0, "weight_sum": 6.0, "weight_square_sum": 12.0}
TERMS = LossTerms(**SUMS, zero_count=1.0, score_sum=2.0)
FACTS: dict[str, Any] = {"denominator": 4.0, "grad_norm": 1.0, "segments": 3, "effective_context": 7.0}
RESULT = StepResult(terms=TERMS, **FACTS, score_seconds=0.5, weight_max=2.0, moe_aux_loss=2.5)


def test_the_losses_of_a_step_are_means() -> None:
    result = replace(RESULT, denominator=6.0)
    assert (result.train_loss, result.lm_loss) == (2.0, 2.0)
    assert result.weight_std == pytest.approx(math.sqrt(12 / 4 - (6 / 4) ** 2))
    empty = replace(RESULT, terms=LossTerms(*[0.0] * 7), denominator=0.0)
    assert (empty.train_loss, empty.lm_loss, empty.weight_std) == (0.0, 0.0, 0.0)


def finished(step: int, outcome: Outcome = Outcome.UPDATED) -> StepRecord:
    facts: dict[str, Any] = {"step": step, "samples": range(8), "consumed_samples": 8 * (step + 1), "window": 16}
    facts |= {"learning_rate": 1e-3, "cp_bytes": 0, "peak_memory_bytes": 1}
    times = {"step_time_s": 2.0, "data_wait_s": 0.0, "save_stall_s": 0.0}
    return StepRecord(**facts, **times, result=replace(RESULT, outcome=outcome))


def records(folder: Path, step: int = 0, **sections: object) -> RunRecords:
    sections = {"data": DataConfig(seq_length=16, global_batch_size=8), **sections}
    config = Config(**{"training": TrainingConfig(train_iters=4), **sections})  # type: ignore[arg-type]
    run_records = RunRecords(config, RunInfo(1000, 1e6, {"host": "here"}), step, first=True)
    run_records.open(folder, is_continued=step > 0)
    return run_records


def test_the_record_of_a_step(tmp_path: Path) -> None:
    run_records = records(tmp_path)
    run_records.after_step(finished(0))
    run_records.after_step(replace(finished(1), source_rows={"books": 5, "code": 3}))
    run_records.close(2, "done")
    line, mixed = read_jsonl(tmp_path / "metrics.jsonl")
    assert abs(line["time"] - time.time()) < 60
    expected = {"step": 0, "consumed_tokens": 128, "lm_loss": 2.0, "train_loss": 3.0, "tokens_per_s": 64.0}
    assert {name: line[name] for name in expected} == expected
    model = run_records.config.model
    context = line["effective_context"]
    attention = 12 * model.num_layers * model.num_attention_heads * model.head_size * context
    assert line["flops"] == pytest.approx(128 * (6 * 1000 + attention))
    assert line["mfu"] == pytest.approx(128 * (6 * 1000 + attention / 2) / 2.0 / 1e6)  # in two seconds, of 1e6 FLOP/s
    assert not [name for name in line if name.startswith(("weight", "score", "source", "moe"))]
    assert mixed["source_rows"] == {"books": 5, "code": 3}
    weighting = WeightingConfig(token_weighting="unfrozen", short_context=4)
    training = TrainingConfig(train_iters=4, moe_aux_loss_coeff=0.1)
    records(tmp_path / "weighted", weighting=weighting, training=training).after_step(finished(0))
    (line,) = read_jsonl(tmp_path / "weighted" / "metrics.jsonl")
    expected = {"zero_share": 0.25, "score_mean": 0.5, "weight_std": pytest.approx(0.75**0.5), "moe_aux_loss": 2.5}
    assert {name: line[name] for name in expected} == expected


def test_each_start_and_end_is_noted(tmp_path: Path) -> None:
    """The record of the end has the step, and whether the run diverged, even if a signal had come before."""
    assert read_history(tmp_path).status == "unknown: the folder has no history.jsonl"
    run_records = records(tmp_path)
    assert read_history(tmp_path).status == "no end recorded: it is still training, or was killed"
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"event": "en')  # killed while writing
    run_records = records(tmp_path, step=2)
    run_records.close(4, "done")
    history = read_history(tmp_path)
    assert ([start["step"] for start in history.starts], history.starts[0]["host"]) == ([0, 2], "here")
    assert (history.status, history.end["step"] if history.end else None) == ("done", 4)
    ending = Ending(signal.SIGTERM, 3, tmp_path / "earlier", DivergedError("loss", float("nan")))
    assert ending.status == DIVERGED
    ending.mark(tmp_path)
    facts = json.loads((tmp_path / "diverged.json").read_text())
    assert (facts["what"], facts["value"], facts["step"]) == ("loss", "nan", 3)


def test_repeated_events_are_logged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_records = records(tmp_path)
    for step in range(3):
        run_records.after_step(finished(step, Outcome.NO_TOKENS))
        run_records.evaluation(step + 1, {16: None}, {}, "one")
    run_records.close(4, "done")
    logged = capsys.readouterr().err
    assert logged.count("has no trained token") == logged.count("its loss is null") == 1
    assert [line["skipped"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 1, 1]
    assert [line["valid_loss"] for line in read_jsonl(tmp_path / "evaluation.jsonl")] == [None] * 3


def test_a_warning_when_s_max_exceeds_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once until it is below the limit again, with the layer where it is largest; metrics.jsonl has every value."""
    run = records(tmp_path, logging=LoggingConfig(tensorboard=False, attention_s_max_warning=50.0))
    for step, largest in enumerate([50.0, 51.0, 60.0, 40.0, float("nan")]):
        health = AttentionHealth((1.0, 2.0), (0.5, 0.0), (0.4, 0.0), (9.0, 8 * largest), (1.0, largest), (3.0, 4.0))
        done = finished(step)
        run.after_step(replace(done, result=replace(done.result, attention=health)))
    run.after_step(finished(5))
    run.close(4, "done")
    logged = [line for line in capsys.readouterr().err.splitlines() if "S_max" in line]
    assert len(logged) == 2
    assert "step 1: S_max of layer 2 is 51.0, above attention_s_max_warning 50" in logged[0]
    assert "step 4: S_max of layer 2 is nan" in logged[1]
    *measured, plain = read_jsonl(tmp_path / "metrics.jsonl")
    assert measured[0]["attention_entropy"] == [1.0, 2.0]
    assert measured[0]["attention_s_max"] == [9.0, 400.0]
    assert not any(key.startswith("attention_") for key in plain)


OPTIONS = TrainingConfig(on_non_finite="skip", skip_limit=3, spike_window=2, train_iters=20)
BAD = TERMS._replace(loss_sum=math.nan, weighted_sum=math.nan)
NOTHING = TERMS._replace(loss_sum=0.0, weighted_sum=0.0, token_count=0.0)
STEPS: dict[str, StepResult] = {
    "well": RESULT,
    "refused": replace(RESULT, terms=BAD, outcome=Outcome.REFUSED),
    "without tokens": replace(RESULT, terms=NOTHING, denominator=0.0, outcome=Outcome.NO_TOKENS),
}
LOSSES = [3.0, 2.5, 2.75, 2.25]


def ended_at(folder: Path, kinds: list[str], interrupted: int | None) -> int | None:
    """The step that ends a run of such steps, which is restarted before step `interrupted`; None: no step."""
    incidents = None
    for step, kind in enumerate(kinds):
        if incidents is None or step == interrupted:
            written = records(folder, step, training=OPTIONS)
            state = json.loads(json.dumps(incidents.state_dict())) if incidents is not None else {}
            incidents = Incidents(Config(training=OPTIONS), written, state)
        try:
            incidents.after_step(replace(finished(step), result=STEPS[kind]))
        except DivergedError:
            return step
    return None


@pytest.mark.parametrize(
    ("kinds", "end"),
    [
        (["well", "refused", "refused", "refused", "well"], 3),
        (["refused", "refused", "well", "refused", "refused", "refused"], 5),
        (["refused", "refused", "without tokens", "refused", "refused", "well"], None),
        (["refused", "refused", "refused"], 2),
    ],
)
def test_a_resumed_run_counts_earlier_skips(tmp_path: Path, kinds: list[str], end: int | None) -> None:
    """Wherever it is interrupted, it ends at the same step."""
    assert ended_at(tmp_path / "whole", kinds, None) == end
    for step in range(1, len(kinds)):
        assert ended_at(tmp_path / str(step), kinds, step) == end, step
    incidents = Incidents(Config(training=OPTIONS), records(tmp_path, training=OPTIONS), {})
    for step, kind in enumerate(["well", "without tokens", "refused"]):
        incidents.after_step(replace(finished(step), result=STEPS[kind]))
    assert incidents.state_dict() == {"loss_history": [2.0], "skips": 1}  # of steps that trained


def test_the_bound_is_the_mean_plus_deviations_of_the_last_window() -> None:
    """A loss that stays high is a spike once."""
    assert spike_bound(LOSSES[:2], 3, 2.0) is None
    assert spike_bound([], 0, 7.0) is None
    assert spike_bound(LOSSES[1:], 3, 2.0) == pytest.approx(np.mean(LOSSES[1:]) + 2 * np.std(LOSSES[1:]))
    assert 2.0 * (1 + 1e-7) < spike_bound([2.0] * 4, 4, 7.0) < 2.001  # room for rounding
    losses = deque([1.0, 1.1] * 4, 8)
    spikes = 0
    for _ in range(20):
        spikes += spike_bound(losses, 8, 4.0) < 5.0
        losses.append(5.0)
    assert spikes == 1
