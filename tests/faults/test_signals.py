"""Stopped by a signal: saved, with the exit status and the file that a launch script reads."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml
from conftest import SmallData
from parity.launch import CONFIG, read_jsonl

from faults.forks import Forks, Running
from megatron_ext.checkpoint.folders import folder_name, locate

COMMON = [*CONFIG, "--seq-length", 64, "--train-iters", 1000, "--window-schedule", "constant"]
TIMEOUT_S = 240


def wait_for_steps(running: Running, metrics: Path, steps: int) -> None:
    while not metrics.exists() or len(read_jsonl(metrics)) < steps:
        assert not running.wait(0.002), Path(f"{running.said}.0.stderr").read_text()


def stopped(running: Running, rank: int, number: signal.Signals) -> str:
    """The exit statuses after a signal to one rank alone."""
    os.kill(running.pids[rank], number)
    assert running.wait(TIMEOUT_S)
    return running.status


@pytest.mark.parametrize(
    ("processes", "rank", "number", "saving", "status"),
    [
        (1, 0, signal.SIGUSR1, (), 85),
        (1, 0, signal.SIGTERM, ("--async-save", "--save-interval", 1), 85),
        (1, 0, signal.SIGINT, (), 130),
        (2, 1, signal.SIGUSR1, ("--async-save", "--save-interval", 1), 85),
    ],
)
def test_the_last_step_is_saved_and_the_launcher_told(
    forks: Forks,
    small_data: SmallData,
    tmp_path: Path,
    processes: int,
    rank: int,
    number: signal.Signals,
    saving: tuple[object, ...],
    status: int,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "stopped.json").write_text("of an earlier run")
    running = forks.start(run, processes, *COMMON, *small_data.flags, *saving, "--save", run)
    wait_for_steps(running, run / "metrics.jsonl", 2)
    assert not (run / "stopped.json").exists()
    assert stopped(running, rank, number) == f"{status}\n" * processes
    steps = len(read_jsonl(run / "metrics.jsonl"))
    assert (newest := locate(run)) is not None
    assert newest.folder == run / "checkpoints" / folder_name(steps)
    if status == 85:
        assert json.loads((run / "stopped.json").read_text()) == {
            "signal": number.name,
            "exit_code": 85,
            "step": steps,
            "checkpoint": f"checkpoints/{folder_name(steps)}",
        }
    else:
        assert not (run / "stopped.json").exists()


def test_without_a_folder_nothing_is_saved_and_nothing_promised(
    forks: Forks, small_data: SmallData, tmp_path: Path
) -> None:
    dump = tmp_path / "dump"
    running = forks.start(tmp_path / "run", 1, *COMMON, *small_data.flags, "--dump-trajectory", dump)
    while not (dump / "step_000001.npz").exists():
        assert not running.wait(0.002)
    assert stopped(running, 0, signal.SIGTERM) == "143\n"
    assert "nothing saved: no --save folder" in (tmp_path / "run.0.stderr").read_text()


def test_a_run_in_stages_tells_it_in_its_own_folder(forks: Forks, small_data: SmallData, tmp_path: Path) -> None:
    config = yaml.safe_load(Path(CONFIG[1]).read_text()) | {
        "stages": [{"name": "short", "training": {"train_iters": 1000}}, {"name": "long"}]
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "run"
    flags = ["--config", tmp_path / "run.yaml", "--no-tensorboard", *small_data.flags, "--seq-length", 64]
    running = forks.start(run, 1, *flags, "--window-schedule", "constant", "--save", run)
    wait_for_steps(running, run / "short" / "metrics.jsonl", 1)
    assert stopped(running, 0, signal.SIGUSR1) == "85\n"
    told = json.loads((run / "stopped.json").read_text())
    assert told["checkpoint"] == f"short/checkpoints/{folder_name(told['step'])}"
    assert (run / told["checkpoint"]).is_dir()


def test_an_evaluation_is_cut_short_and_made_up_for(forks: Forks, small_data: SmallData, tmp_path: Path) -> None:
    """The checkpoint is there first; whoever continues, with another number of processes too, evaluates there."""
    run = tmp_path / "run"
    flags = [
        *COMMON,
        *small_data.flags,
        "--train-iters",
        3,
        "--eval-interval",
        3,
        "--lr-warmup-iters",
        0,
        "--save",
        run,
    ]
    running = forks.start(run, 1, *flags, "--eval-iters", 30)
    wait_for_steps(running, run / "metrics.jsonl", 3)
    assert stopped(running, 0, signal.SIGUSR1) == "85\n"
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0]
    assert (newest := locate(run)) is not None
    assert newest.folder == run / "checkpoints" / folder_name(3)
    again = forks.start(tmp_path / "again", 2, *flags, "--eval-iters", 1, "--load", run)
    assert again.wait(TIMEOUT_S)
    assert again.status == "0\n0\n"
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0, 3]
    said = Path(f"{again.said}.0.stderr").read_text()
    assert "checkpoint of another layout: random states start anew" in said
    assert len(read_jsonl(run / "metrics.jsonl")) == 3
