"""On CUDA the host learns of a step while the next one computes: a run and its ends are the same either way."""

import json
import signal
from pathlib import Path

import pytest

from megatron_ext.checkpoint.folders import folder_name, locate, saved_steps
from tests.conftest import SmallData
from tests.faults.test_divergence import SPOILT, check, recommended
from tests.faults.test_kills import checksums
from tests.launcher import TIMEOUT_S, Commands
from tests.runs import CONFIG, TRAINER, read_jsonl, without_times

AHEAD = "tests/parity/one_step_ahead.py"
COMMON = [*CONFIG, "--seq-length", 64, "--window-schedule", "constant"]
LAYOUT = ["--context-parallel-size", 2]


def test_records_validations_and_checkpoints(small_data: SmallData, tmp_path: Path) -> None:
    """Saving and validating at steps that coincide and that do not, and a last step that does neither."""
    flags = [*COMMON, *small_data.flags, *LAYOUT, "--train-iters", 7, "--save-interval", 3]
    flags += ["--eval-interval", 2, "--eval-iters", 1]
    for script in (TRAINER, AHEAD):
        Commands(2).run(script, *flags, "--save", tmp_path / Path(script).stem)
    plain, ahead = (tmp_path / Path(script).stem for script in (TRAINER, AHEAD))
    records = read_jsonl(plain / "metrics.jsonl")
    assert len(records) == 7
    assert without_times(read_jsonl(ahead / "metrics.jsonl")) == without_times(records)
    assert read_jsonl(ahead / "evaluation.jsonl") == read_jsonl(plain / "evaluation.jsonl")
    for step in (3, 6, 7):
        assert checksums(plain, step)
        assert checksums(ahead, step) == checksums(plain, step)


@pytest.mark.parametrize(
    "saving", [("--save-interval", 1), pytest.param(("--save-interval", 2, "--async-save"), marks=pytest.mark.slow)]
)
def test_divergence(small_data: SmallData, tmp_path: Path, saving: tuple[object, ...]) -> None:
    """A step is under way when the one before it turns out to have diverged: nothing is recorded or saved of either."""
    flags = [*COMMON, *small_data.flags, *LAYOUT, *SPOILT, *saving, "--train-iters", 50, "--eval-interval", 0]
    seen = []
    for script in (TRAINER, AHEAD):
        run = tmp_path / Path(script).stem
        done = Commands(2).attempt(script, *flags, "--save", run)
        diverged_at = json.loads((run / "diverged.json").read_text())["step"]
        good = max(
            (step for step in saved_steps(run) if step < diverged_at), default=None
        )  # a later one has its weights
        facts = check(run, done, good)
        if good is not None:
            folder = run / "checkpoints" / folder_name(good)
            assert recommended(done[0]) == ["--load", str(folder), "--override", "lr", "clip_grad"]
        seen.append((facts["step"], facts["what"], facts["value"], good))
    assert seen[0] == seen[1]
    assert seen[0][0] > 0


def test_a_signal(small_data: SmallData, tmp_path: Path) -> None:
    """All processes stop after the same step, whose record and checkpoint are the last."""
    run = tmp_path / "run"
    running = Commands(2).start(AHEAD, *COMMON, *small_data.flags, *LAYOUT, "--train-iters", 1000, "--save", run)
    running.wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) >= 2)
    running.signal(signal.SIGUSR1, 1)
    assert running.wait(TIMEOUT_S)
    assert running.statuses == [85, 85]
    steps = len(read_jsonl(run / "metrics.jsonl"))
    assert locate(run).folder.name == folder_name(steps)
    assert json.loads((run / "stopped.json").read_text())["step"] == steps
