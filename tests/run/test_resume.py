"""What a run takes over from an earlier start: its configuration, and the checkpoints of the same command."""

import shutil
from pathlib import Path

import pytest

from megatron_ext.checkpoint.folders import saved_steps
from megatron_ext.checkpoint.history import first_start
from megatron_ext.config.arguments import of_start, parse
from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, read_jsonl, refused_command, series

CONSTANT = ["--window-schedule", "constant", "--lr-decay-style", "constant", "--lr-warmup-iters", 0]


@pytest.fixture
def flags(small_data: SmallData) -> list[object]:
    return [*CONFIG, *small_data.flags, *CONSTANT, "--seq-length", 64, "--save-interval", 1, "--no-tensorboard"]


def test_a_run_s_configuration_keeps_nothing_of_one_start(flags: list[object], alone: Commands, tmp_path: Path) -> None:
    """It lacks what a start loaded from, which would be gone back to each time, and what it was allowed once."""
    run = tmp_path / "run"
    alone.run(TRAINER, *flags, "--train-iters", 3, "--save", run)
    back = ["--load", run / "checkpoints" / "iter_0000001", "--lr", 5e-4, "--override", "lr", "--no-verify-load"]
    back += ["--load-if-present", "--load-latest-complete", "--dump-trajectory", tmp_path / "trajectory"]
    alone.run(TRAINER, *flags, "--train-iters", 3, "--save", run, *back)
    config = ["--config", run / "config.yaml"]
    assert of_start(parse(list(map(str, config)))) == {}
    start = [line for line in read_jsonl(run / "history.jsonl") if line["event"] == "start"][-1]
    assert (start["load"], start["override"]) == (str(back[1]), ["lr"])

    longer = [*config, "--train-iters", 4]
    assert f"add --load {run} to continue that run" in refused_command(alone, TRAINER, *longer)
    mistyped = refused_command(alone, TRAINER, *longer, "--load", run, "--save", run, "--lr", 5e-2)
    assert "lr 0.0005 -> 0.05" in mistyped
    alone.run(TRAINER, *longer, "--load", run, "--save", run)
    assert series(run, "step") == [0, 1, 2, 3]


def test_weights_that_no_checkpoint_has_yet_are_named_again(
    flags: list[object], alone: Commands, tmp_path: Path
) -> None:
    """A run killed before its first checkpoint would otherwise begin anew, from random weights or a new optimizer."""
    base, run = tmp_path / "base", tmp_path / "run"
    optimizer = ["--init-from", base, "--init-optimizer"]
    alone.run(TRAINER, *flags, "--train-iters", 1, "--save", base)
    alone.run(TRAINER, *flags, "--train-iters", 1, "--save", run, *optimizer)
    shutil.rmtree(run / "checkpoints")
    assert first_start(run)["init_from"] == str(base)
    again = ["--config", run / "config.yaml", "--load", run, "--load-if-present", "--save", run]
    assert f"init_from: got none, but {run}, which has no checkpoint yet" in refused_command(alone, TRAINER, *again)
    refusal = refused_command(alone, TRAINER, *again, "--init-from", base)
    assert "init_optimizer: got none" in refusal
    assert f"--init-from {base} --init-optimizer" in refusal
    alone.run(TRAINER, *again, *optimizer)


def test_the_command_that_began_a_branch_continues_it(flags: list[object], alone: Commands, tmp_path: Path) -> None:
    """A launch script gives it again after status 85; the branch of another run is still refused."""
    base, branch, other_run = (tmp_path / name for name in ("base", "branch", "other"))
    for run in (base, other_run):
        alone.run(TRAINER, *flags, "--train-iters", 1, "--save", run)
    command = [*flags, "--load", base, "--load-if-present", "--save", branch]
    branch.mkdir()  # left by an earlier start, which saved nothing and whose weights are lost
    (branch / "metrics.jsonl").write_bytes((base / "metrics.jsonl").read_bytes())
    alone.run(TRAINER, *command, "--train-iters", 2)
    (done,) = alone.run(TRAINER, *command, "--train-iters", 3)
    assert f"continuing from {branch}/checkpoints/iter_0000002 after 2 steps" in done.stderr
    assert saved_steps(branch) == [2, 3]
    alone.run(TRAINER, *flags, "--load", branch, "--save", branch, "--train-iters", 4)
    alone.run(TRAINER, *command, "--train-iters", 5)
    assert series(branch, "step") == [1, 2, 3, 4]
    foreign = [*flags, "--load", base, "--load-if-present", "--save", other_run]
    assert "holds the checkpoints of another run" in refused_command(alone, TRAINER, *foreign)
