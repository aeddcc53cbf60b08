"""A run that diverges: all processes end immediately, with one line and their own exit status.

parity/test_one_step_ahead.py has a loss that is not finite.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.run.signals import DIVERGED
from tests.conftest import SmallData
from tests.launcher import Commands, Done
from tests.runs import CONFIG, TRAINER, read_jsonl

COMMON = [*CONFIG, "--seq-length", 64, "--train-iters", 50, "--window-schedule", "constant", "--eval-interval", 0]
SPOILT = ["--lr", 1e30, "--min-lr", 1e30, "--lr-warmup-iters", 0, "--clip-grad", 0, "--init-method-std", 0.02]
OVERFLOWING = 1.3e18  # products of queries and keys are infinite from the first step on, norms are not


def check(run: Path, done: list[Done], saved: int | None) -> dict[str, Any]:
    """All processes have ended, rank 0 with one line and a file, which is returned."""
    assert [process.status for process in done] == [DIVERGED] * len(done), done[0].stderr
    assert not any("Traceback" in process.stderr for process in done)
    assert not any("diverged" in process.stderr for process in done[1:])
    facts: dict[str, Any] = json.loads((run / "diverged.json").read_text())
    assert facts["step"] == len(read_jsonl(run / "metrics.jsonl")) < 50
    assert f"the {facts['what']} of step {facts['step']} is {facts['value']}" in line_of(done[0])
    assert facts["checkpoint"] == (None if saved is None else str(run / "checkpoints" / f"iter_{saved:07d}"))
    assert not (run / "stopped.json").exists()
    return facts


def test_losses_that_cannot_be_weighted(small_data: SmallData, tmp_path: Path) -> None:
    """The last stage alone computes weights: it sees the losses first, while the others wait for it."""
    run = tmp_path / "run"
    layout = ["--pipeline-model-parallel-size", 2]
    weighted = ["--token-weighting", "unfrozen", "--short-context", 16, "--init-method-std", OVERFLOWING]
    done = Commands(2).attempt(TRAINER, *COMMON, *small_data.flags, *weighted, *layout, "--save", run)
    assert check(run, done, None)["what"] == "loss"


def line_of(done: Done) -> str:
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("diverged: ")]
    return line


def recommended(done: Done) -> list[str]:
    """The flags that the line of a divergence recommends, except the learning rate."""
    return line_of(done).partition("start again with ")[2].partition(" and a lower --lr")[0].split()


def test_the_recommended_flags_continue_a_stage(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """A stage continues from its newest checkpoint."""
    run, config = tmp_path / "run", tmp_path / "run.yaml"
    stages = [{"name": "calm"}, {"name": "wild", "optimizer": {"lr": 1e30, "lr_warmup_iters": 2, "clip_grad": 0.0}}]
    content = yaml.safe_load(Path(CONFIG[1]).read_text()) | {"stages": stages}
    content["optimizer"] |= {"lr_warmup_from_zero": True, "lr_warmup_iters": 1}
    config.write_text(yaml.safe_dump(content))
    command = [TRAINER, "--config", config, *COMMON[2:], *small_data.flags, "--train-iters", 4]
    command += ["--save-interval", 1, "--save", run]
    (done,) = alone.attempt(*command)
    assert done.status == DIVERGED, done.stderr
    checkpoints = sorted((run / "wild" / "checkpoints").glob("iter_*"))
    spoilt = re.search(r", (\S+) has the weights that diverged \(move it away\); start again", line_of(done))
    flags = recommended(done)
    latest = ["--load-latest-complete"] if len(checkpoints) > 1 else []
    assert flags == ["--stage", "wild", "--load", str(run), *latest, "--override", "lr", "clip_grad"]
    assert spoilt is not None
    assert spoilt[1] == str(checkpoints[-1])
    shutil.rmtree(spoilt[1])
    (done,) = alone.run(*command, *flags, "--lr", 1e-4)
    assert len(read_jsonl(run / "wild" / "metrics.jsonl")) == 4


def test_a_validation_loss_that_is_not_finite(small_data: SmallData, tmp_path: Path) -> None:
    """The last step makes the weights unusable, which only the validation after it shows."""
    run = tmp_path / "run"
    command = [TRAINER, *COMMON, *small_data.flags, "--train-iters", 2, "--eval-interval", 1, "--eval-iters", 1]
    command += ["--lr-warmup-from-zero", "--lr-warmup-iters", 1, "--save-interval", 1, "--save", run]
    command += ["--lr-decay-style", "constant"]
    done = Commands(2).attempt(*command, "--lr", 1e15, "--clip-grad", 0)
    facts = check(run, done, 1)
    assert (facts["what"], facts["step"]) == ("validation loss", 2)
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0, 1]
    # a branch that saves nothing before this validation: the checkpoint it began with is good
    branch = ["--load", run / "checkpoints" / "iter_0000001", "--override", "lr", "clip_grad", "train_iters"]
    branch += ["--train-iters", 3, "--save-interval", 0, "--save", tmp_path / "branch"]
    (process, _) = Commands(2).attempt(*command, "--lr", 1e15, "--clip-grad", 0, *branch)
    assert "--load " + str(run / "checkpoints" / "iter_0000001") in line_of(process)
    flags = recommended(done[0])
    assert flags == ["--load", str(run / "checkpoints" / "iter_0000001"), "--override", "lr", "clip_grad"]
    Commands(2).run(*command, *flags, "--lr", 1e-4)
    assert not (run / "diverged.json").exists()  # a run that begins there takes the mark away
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0, 1, 2]
