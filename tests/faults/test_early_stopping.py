"""Early stopping: at the step that the losses determine, on all processes, resumed or not."""

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.checkpoint.folders import saved_steps
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, read_jsonl, relative, series
from tests.theirs import write_theirs

LENGTH = 32
STEPS = 40
EVERY = 2
PATIENCE = 3
DP2_PP2 = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Train on counting documents, validate on shuffled ones: the loss falls while tokens are learned, then rises."""
    chance = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("worse")
    counting = [np.arange(LENGTH) % 8 for _ in range(200)]
    write_theirs(folder / "train", counting, 57)
    write_theirs(folder / "valid", [chance.permutation(document) for document in counting[:40]], 57)
    options = (
        f"--tokenizer-model none --vocab-size 57 --seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 4 "
        f"--window-schedule constant --train-iters {STEPS} --lr 3e-3 --min-lr 3e-3 --lr-warmup-iters 0 --num-layers 2 "
        f"--lr-decay-style constant --spike-window 0 --seed 1 --eval-interval {EVERY} --eval-iters 2"
    )
    paths = ["--split", "1,0,0", "--data-path", folder / "train", "--valid-data-path", folder / "valid"]
    return [*CONFIG, *paths, *options.split()]


def losses(run: Path) -> list[float]:
    return [record["valid_loss"] for record in read_jsonl(run / "evaluation.jsonl")]


def history(run: Path) -> list[dict[str, object]]:
    return read_jsonl(run / "history.jsonl")


@pytest.mark.slow
def test_every_layout_stops_at_the_same_step(flags: list[object], alone: Commands, tmp_path: Path) -> None:
    alone.run(TRAINER, *flags, "--save", tmp_path / "whole")
    whole = losses(tmp_path / "whole")
    best = int(np.argmin(whole)) * EVERY  # with no minimum before it that lasts as long
    end = best + PATIENCE * EVERY
    assert 0 < best < end < STEPS  # else nothing is tested
    run = tmp_path / "run"
    four_processes = Commands(4)
    patient = [*flags, *DP2_PP2.split(), "--early-stopping-patience", PATIENCE, "--save", run]
    cut = end - EVERY  # all but one of the validations in vain are before it
    four_processes.run(TRAINER, *patient, "--train-iters", cut)
    assert history(run)[-1]["how"] == "done"
    done = four_processes.run(TRAINER, *patient, "--load", run)
    assert relative(losses(run), whole[: end // EVERY + 1]) < 1e-4
    assert series(run, "step") == list(range(end))
    assert saved_steps(run) == [cut, end]
    last = history(run)[-1]
    assert (last["event"], last["step"]) == ("end", end)
    assert str(last["how"]).startswith(f"stopped early: the validation loss was lowest after {best} steps")

    done = four_processes.run(TRAINER, *patient, "--load", run)  # what has stopped early has nothing left to do
    assert "nothing is left to do: the run stopped early before" in done[0].stderr
    assert len(losses(run)) == end // EVERY + 1
    assert history(run)[-1]["how"] == last["how"]


def test_validations_that_measure_something_else_are_not_compared(
    flags: list[object], alone: Commands, tmp_path: Path
) -> None:
    """No loss is better by so large a delta, so a run ends with the second validation of a setting."""
    early = [*flags, "--early-stopping-patience", 1, "--early-stopping-delta", 100, "--save", tmp_path]
    alone.run(TRAINER, *early)
    assert saved_steps(tmp_path) == [EVERY]
    (done,) = alone.run(TRAINER, *early, "--load", tmp_path, "--eval-iters", 3)
    assert "early stopping counts anew: 2 earlier validations measured something else" in done.stderr
    assert saved_steps(tmp_path) == [EVERY, 3 * EVERY]
    assert [record["step"] for record in read_jsonl(tmp_path / "evaluation.jsonl")] == [0, 2, 4, 6]


@pytest.mark.slow
def test_a_stage_that_stopped_early_is_complete(flags: list[object], alone: Commands, tmp_path: Path) -> None:
    """A delta that no loss is better by: the first stage ends after as many validations as it has patience."""
    stages = tmp_path / "stages.yaml"
    stages.write_text("stages: [{name: first}, {name: second}]\n")
    run = tmp_path / "run"
    early = ["--early-stopping-patience", 1, "--early-stopping-delta", 100, "--save", run]
    command = ["--config", stages, "--no-tensorboard", *flags[len(CONFIG) :], "--model-preset", "tiny-1M", *early]
    alone.run(TRAINER, *command)
    for stage in ("first", "second"):
        assert saved_steps(run / stage) == [EVERY]
        assert str(history(run / stage)[-1]["how"]).startswith("stopped early: the validation loss was lowest after 0")
    (done,) = alone.run(TRAINER, *command, "--load", run)
    assert "stage first has all its steps" in done.stderr
    assert len(history(run / "first")) == 2  # it has not begun again
