"""A run whose numbers are no longer finite: a line, an exit status of its own, all processes, and at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import SmallData
from launcher import Commands
from runs import CONFIG, attempt, read_jsonl

from megatron_ext.run.signals import DIVERGED

SCRIPT = "pretrain_skyladder.py"
COMMON = [*CONFIG, "--seq-length", 64, "--train-iters", 50, "--window-schedule", "constant", "--eval-interval", 0]
SPOILT = ["--lr", 1e30, "--min-lr", 1e30, "--lr-warmup-iters", 0, "--clip-grad", 0, "--init-method-std", 0.02]
OVERFLOWING = 1.3e18  # products of queries and keys are infinite from the first step on, norms are not


@pytest.fixture(scope="module")
def two() -> Commands:
    return Commands(2)


def check(run: Path, said: str, saved: int | None) -> None:
    (line,) = [line for line in said.splitlines() if line.startswith("diverged: ")]
    assert "Traceback" not in said
    steps = len(read_jsonl(run / "metrics.jsonl"))
    facts = json.loads((run / "diverged.json").read_text())
    assert (facts["exit_code"], facts["step"]) == (DIVERGED, steps)
    assert steps < 50
    assert line.startswith(f"diverged: the {facts['what']} of step {steps} is {facts['value']}, needs a finite number;")
    checkpoint = run / "checkpoints" / f"iter_{saved:07d}" if saved is not None else None
    assert facts["checkpoint"] == (None if checkpoint is None else str(checkpoint))
    again = "there is no checkpoint; start again with a lower --lr"
    if saved is not None:
        again = f"the newest checkpoint is {checkpoint}; start again with --load {checkpoint} (or an earlier one) and"
    assert again in line
    assert not (run / "stopped.json").exists()


@pytest.mark.parametrize("saving", [(), ("--save-interval", 1), ("--save-interval", 1, "--async-save")])
def test_one_process(alone: Commands, small_data: SmallData, tmp_path: Path, saving: tuple[object, ...]) -> None:
    run = tmp_path / "run"
    (done,) = alone.attempt(SCRIPT, *COMMON, *small_data.flags, *SPOILT, *saving, "--save", run)
    assert done.status == DIVERGED, done.stderr
    check(run, done.stderr, len(read_jsonl(run / "metrics.jsonl")) if saving else None)
    (done,) = alone.attempt(SCRIPT, *COMMON, *small_data.flags, "--train-iters", 6, "--save", tmp_path / "other")
    assert done.status == 0, done.stderr


def test_every_process_ends_and_the_first_says_it(two: Commands, small_data: SmallData, tmp_path: Path) -> None:
    run, parallel = tmp_path / "run", ["--context-parallel-size", 2, "--save-interval", 1]
    done = two.attempt(SCRIPT, *COMMON, *small_data.flags, *SPOILT, *parallel, "--save", run)
    assert [one.status for one in done] == [DIVERGED] * 2, done[0].stderr + done[1].stderr
    check(run, done[0].stderr, len(read_jsonl(run / "metrics.jsonl")))
    assert "diverged" not in done[1].stderr
    assert "Traceback" not in done[1].stderr


@pytest.mark.parametrize("layout", [["--pipeline-model-parallel-size", 2], ["--use-distributed-optimizer"]])
def test_losses_that_cannot_be_weighed(
    two: Commands, small_data: SmallData, tmp_path: Path, layout: list[object]
) -> None:
    """The last stage alone weighs: it meets the losses before any other, which would wait for it."""
    run = tmp_path / "run"
    weighted = ["--token-weighting", "unfrozen", "--short-context", 16, "--init-method-std", OVERFLOWING]
    done = two.attempt(SCRIPT, *COMMON, *small_data.flags, *weighted, *layout, "--save", run)
    assert [one.status for one in done] == [DIVERGED] * 2, done[0].stderr + done[1].stderr
    check(run, done[0].stderr, None)
    assert json.loads((run / "diverged.json").read_text())["what"] == "loss"
    assert "Traceback" not in done[1].stderr


def test_a_run_that_begins_takes_the_mark_away(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "diverged.json").write_text("of an earlier run")
    alone.run(SCRIPT, *COMMON, *small_data.flags, "--train-iters", 6, "--save", run)
    assert not (run / "diverged.json").exists()


def test_under_torchrun(small_data: SmallData, tmp_path: Path) -> None:
    """It exits with 1 itself, and says so at length: the mark tells."""
    run = tmp_path / "run"
    done = attempt([*COMMON, *small_data.flags, *SPOILT, "--pipeline-model-parallel-size", 2], 2, run)
    assert done.returncode == 1
    assert json.loads((run / "diverged.json").read_text())["exit_code"] == DIVERGED
    assert done.stderr.count("diverged: ") == 1
    assert f"exitcode  : {DIVERGED} " in done.stderr
