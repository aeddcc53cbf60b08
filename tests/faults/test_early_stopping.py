"""Early stopping: at the step that the losses determine, on all processes, resumed or not."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.checkpoint.folders import saved_steps
from tests.launcher import Commands
from tests.runs import CONFIG, read_jsonl, relative
from tests.theirs import write_theirs

TRAINER = "pretrain_skyladder.py"
LENGTH, STEPS, EVERY, PATIENCE = 32, 40, 2, 3
DP2_PP2 = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Train on counting documents, validate on shuffled ones: the loss falls while tokens are learned, then rises."""
    chance, folder = np.random.default_rng(0), tmp_path_factory.mktemp("worse")
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


@pytest.fixture(scope="module")
def whole(flags: list[object], alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("whole") / "run"
    alone.run(TRAINER, *flags, "--save", run)
    assert history(run)[-1]["how"] == "done"
    return losses(run)


def losses(run: Path) -> list[float]:
    return [record["valid_loss"] for record in read_jsonl(run / "evaluation.jsonl")]


def history(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def end_of(series: list[float], patience: int) -> int:
    """The steps after which a run with these losses stops: the first with no new lowest in `patience` validations."""
    for number in range(patience, len(series)):
        if min(series[number - patience + 1 : number + 1]) >= min(series[: number - patience + 1]):
            return number * EVERY
    return STEPS


@pytest.mark.slow
def test_two_replicas_and_two_stages_stop_where_one_process_does_resumed_or_not(
    flags: list[object], whole: list[float], tmp_path: Path
) -> None:
    end = end_of(whole, PATIENCE)
    best = int(np.argmin(whole)) * EVERY
    assert 0 < best < end < STEPS  # else nothing is tested
    assert end == best + PATIENCE * EVERY
    run, four = tmp_path / "run", Commands(4)
    patient = [*flags, *DP2_PP2.split(), "--early-stopping-patience", PATIENCE, "--save", run]
    cut = end - EVERY  # all but one of the validations in vain are before it
    four.run(TRAINER, *patient, "--train-iters", cut)
    assert history(run)[-1]["how"] == "done"
    done = four.attempt(TRAINER, *patient, "--load", run)
    assert [one.status for one in done] == [0] * 4, done[0].stderr
    assert relative(losses(run), whole[: end // EVERY + 1]) < 1e-4
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == list(range(end))
    assert saved_steps(run) == [cut, end]
    last = history(run)[-1]
    assert (last["event"], last["step"]) == ("end", end)
    assert str(last["how"]).startswith(f"stopped early: the validation loss was lowest after {best} steps")

    done = four.attempt(TRAINER, *patient, "--load", run)  # what has stopped early has nothing left to do
    assert [one.status for one in done] == [0] * 4, done[0].stderr
    assert "nothing is left to do: the run stopped early before" in done[0].stderr
    assert len(losses(run)) == end // EVERY + 1
    assert history(run)[-1]["how"] == last["how"]


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
    (done,) = alone.attempt(TRAINER, *command, "--load", run)
    assert done.status == 0, done.stderr
    assert "stage first has all its steps" in done.stderr
    assert len(history(run / "first")) == 2  # it has not begun again
