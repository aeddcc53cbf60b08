"""Stopped by a signal: saved, with the exit status and the file that a launch script reads."""

import json
import signal
from pathlib import Path

import pytest
import yaml

from megatron_ext.checkpoint.folders import folder_name, locate
from tests.conftest import SmallData
from tests.launcher import TIMEOUT_S, Commands, Running
from tests.runs import CONFIG, TRAINER, read_jsonl

COMMON = [*CONFIG, "--seq-length", 64, "--train-iters", 1000, "--window-schedule", "constant"]


def wait_for_steps(running: Running, metrics: Path, steps: int) -> None:
    running.wait_for(lambda: len(read_jsonl(metrics)) >= steps)


def stopped(running: Running, number: signal.Signals, rank: int = 0) -> list[int | None]:
    """The exit statuses after a signal to one rank alone."""
    running.signal(number, rank)
    assert running.wait(TIMEOUT_S)
    return running.statuses


@pytest.mark.parametrize(
    ("processes", "number", "saving"),
    [
        (1, signal.SIGTERM, ("--async-save", "--save-interval", 1)),
        (1, signal.SIGINT, ()),
        (2, signal.SIGUSR1, ("--async-save", "--save-interval", 1)),
    ],
)
def test_the_last_step_is_saved_and_stopped_json_written(
    small_data: SmallData, tmp_path: Path, processes: int, number: signal.Signals, saving: tuple[object, ...]
) -> None:
    """The last rank alone has the signal; after SIGINT no launch script goes on."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "stopped.json").write_text("of an earlier run")
    running = Commands(processes).start(TRAINER, *COMMON, *small_data.flags, *saving, "--save", run)
    wait_for_steps(running, run / "metrics.jsonl", 2)
    assert not (run / "stopped.json").exists()
    status = 130 if number == signal.SIGINT else 85
    assert stopped(running, number, rank=processes - 1) == [status] * processes
    steps = len(read_jsonl(run / "metrics.jsonl"))
    assert locate(run).folder == run / "checkpoints" / folder_name(steps)
    if status == 85:
        said = json.loads((run / "stopped.json").read_text())
        assert said == {"signal": number.name, "exit_code": 85, "step": steps, "checkpoint": said["checkpoint"]}
        assert said["checkpoint"] == f"checkpoints/{folder_name(steps)}"
    else:
        assert not (run / "stopped.json").exists()


def test_without_a_folder_nothing_is_saved(small_data: SmallData, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    running = Commands().start(TRAINER, *COMMON, *small_data.flags, "--dump-trajectory", dump)
    running.wait_for((dump / "step_000001.npz").exists)
    assert stopped(running, signal.SIGTERM) == [143]
    assert "nothing saved: no --save folder" in running.done()[0].stderr


def test_a_run_in_stages_writes_stopped_json_in_its_own_folder(small_data: SmallData, tmp_path: Path) -> None:
    config = yaml.safe_load(Path(CONFIG[1]).read_text()) | {
        "stages": [{"name": "short", "training": {"train_iters": 1000}}, {"name": "long"}]
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "a run"
    flags = ["--config", tmp_path / "run.yaml", "--no-tensorboard", *small_data.flags, "--seq-length", 64]
    running = Commands().start(TRAINER, *flags, "--window-schedule", "constant", "--save", run)
    wait_for_steps(running, run / "short" / "metrics.jsonl", 1)
    assert stopped(running, signal.SIGUSR1) == [85]
    stopped_json = json.loads((run / "stopped.json").read_text())
    assert stopped_json["checkpoint"] == f"short/checkpoints/{folder_name(stopped_json['step'])}"
    assert (run / stopped_json["checkpoint"]).is_dir()
    assert f"{run / stopped_json['checkpoint']}; --load '{run}' continues from there" in running.done()[0].stderr


def test_an_interrupted_validation_is_repeated_on_resume(small_data: SmallData, tmp_path: Path) -> None:
    """The checkpoint is saved first; a resumed run, also with another number of processes, validates at its step."""
    run = tmp_path / "run"
    flags = [*COMMON, *small_data.flags, "--train-iters", 3, "--eval-interval", 3, "--lr-warmup-iters", 0]
    flags += ["--save", run]
    running = Commands().start(TRAINER, *flags, "--eval-iters", 30)
    wait_for_steps(running, run / "metrics.jsonl", 3)
    assert stopped(running, signal.SIGUSR1) == [85]
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0]
    assert locate(run).folder == run / "checkpoints" / folder_name(3)
    again, _ = Commands(2).run(TRAINER, *flags, "--eval-iters", 1, "--load", run)
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0, 3]
    assert "checkpoint of another layout: random states start anew" in again.stderr
    assert len(read_jsonl(run / "metrics.jsonl")) == 3
