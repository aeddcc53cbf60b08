"""A planted spike: kept, skipped by all processes alike, or the end of the run; and the step done once more."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from launcher import Commands
from runs import CONFIG, read_jsonl, relative
from theirs import write_theirs

from megatron_ext.checkpoint.folders import folder_name
from megatron_ext.run.signals import DIVERGED

TRAINER, REPLAY = "pretrain_skyladder.py", "tools/replay_step.py"
LENGTH, STEPS, SPIKE = 32, 16, 7
GARBAGE = 8  # token ids from here on are in one document alone
DP2_PP2 = "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Documents that count from 0 to 7 again and again, and one of random tokens, which step SPIKE reads."""
    chance = np.random.default_rng(0)
    documents = [np.arange(LENGTH) % GARBAGE for _ in range(72)]
    documents[30] = chance.integers(GARBAGE, 57, LENGTH)
    prefix = tmp_path_factory.mktemp("planted") / "corpus"
    write_theirs(prefix, documents, 57)
    options = (
        f"--split 100,0,0 --tokenizer-model none --vocab-size 57 --seq-length {LENGTH} --micro-batch-size 1 "
        f"--global-batch-size 4 --window-schedule constant --train-iters {STEPS} --lr 1e-3 --min-lr 1e-3 "
        "--lr-warmup-iters 0 --num-layers 2 --spike-window 4 --spike-deviations 4 --seed 1"
    )
    return [*CONFIG, "--data-path", prefix, *options.split()]


@pytest.fixture(scope="module")
def went_on(flags: list[object], alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that trains on the spike."""
    run = tmp_path_factory.mktemp("went_on") / "run"
    trajectory = ["--dump-trajectory", run / "trajectory", "--save-interval", 5]
    (done,) = alone.attempt(TRAINER, *flags, *trajectory, "--save", run)
    assert done.status == 0, done.stderr
    (run / "said").write_text(done.stderr)
    return run


def series(run: Path, name: str) -> list[float]:
    return [record[name] for record in read_jsonl(run / "metrics.jsonl")]


def said_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "loss spike" in line]


def test_a_spike_is_counted_said_and_kept(went_on: Path) -> None:
    assert series(went_on, "spike") == [int(step == SPIKE) for step in range(STEPS)]
    assert series(went_on, "skipped") == [0] * STEPS
    losses = series(went_on, "lm_loss")
    before = losses[SPIKE - 4 : SPIKE]
    bound = np.mean(before) + 4 * np.std(before)
    assert losses[SPIKE] > bound
    folder = went_on / "incidents" / "step_0000007"
    assert [one.name for one in folder.parent.iterdir()] == [folder.name]
    (line,) = said_of((went_on / "said").read_text())
    assert f"the loss spike of step 7 is {losses[SPIKE]:.4f}, needs at most {bound:.4f}; training goes on; rows" in line
    facts = json.loads((folder / "incident.json").read_text())
    assert (facts["cause"], facts["action"], facts["seed"], facts["window"]) == ("loss spike", "continue", 1, LENGTH)
    assert facts["lm_loss"] == losses[SPIKE]
    assert facts["bound"] == pytest.approx(bound)
    kept, trained = np.load(folder / "rows.npz"), np.load(went_on / "trajectory" / "step_000007.npz")
    for name in trained:
        np.testing.assert_array_equal(kept[name], trained[name], err_msg=name)
    assert (kept["tokens"] >= GARBAGE).any()
    assert kept["sample"].tolist() == list(range(4 * SPIKE, 4 * SPIKE + 4))


def test_a_replay_reproduces_the_step_and_names_its_row(went_on: Path, alone: Commands, tmp_path: Path) -> None:
    (done,) = alone.attempt(REPLAY, went_on, SPIKE, "--output", tmp_path / "replay")
    assert done.status == 0, done.stderr
    assert "reproduced: largest relative difference" in done.stdout
    made = json.loads((tmp_path / "replay" / "replay.json").read_text())
    assert made["checkpoint"] == str(went_on / "checkpoints" / folder_name(5))
    assert made["same_rows"]
    arrays = np.load(tmp_path / "replay" / "losses.npz")
    means = arrays["losses"].mean(axis=1, where=arrays["loss_mask"])
    assert means.mean() == pytest.approx(series(went_on, "lm_loss")[SPIKE], rel=1e-6)
    worst = int(np.argmax(means))
    assert (arrays["tokens"][worst] >= GARBAGE).any()
    assert made["rows"][0]["sample"] == arrays["sample"][worst]
    assert made["rows"][0]["loss"] == pytest.approx(means[worst], rel=1e-6)
    assert f"sample {arrays['sample'][worst]}, tokens" in done.stdout
    squares = math.fsum(norm**2 for norm in made["gradient_norms"].values())
    assert squares**0.5 == pytest.approx(series(went_on, "grad_norm")[SPIKE], rel=1e-5)
    parts = [f"layer {n} {kind}" for n in (1, 2) for kind in ("MLP", "attention", "norms")]
    assert list(made["gradient_norms"]) == ["embedding", *parts, "final norm", "output"]


def test_a_step_before_the_first_checkpoint_is_replayed_from_the_first_weights(went_on: Path, alone: Commands) -> None:
    (done,) = alone.attempt(REPLAY, went_on, 3)
    assert done.status == 0, done.stdout + done.stderr
    assert "from the first weights of the run; recorded in" in done.stdout


@pytest.mark.slow
def test_a_replay_that_differs_says_so(went_on: Path, alone: Commands, tmp_path: Path) -> None:
    """Another step's numbers in the record, and a row that the data no longer has."""
    run = tmp_path / "run"
    shutil.copytree(went_on, run)
    folder = run / "incidents" / "step_0000007"
    records = read_jsonl(run / "metrics.jsonl")
    records[SPIKE]["grad_norm"] *= 1.001
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = dict(np.load(folder / "rows.npz"))
    rows["tokens"][0, 0] += 1
    np.savez(folder / "rows.npz", **rows)
    (done,) = alone.attempt(REPLAY, run, SPIKE)
    assert done.status == 1, done.stderr
    assert "NOT reproduced: largest relative difference 1.0e-03" in done.stdout
    assert "NOT those of the incident" in done.stdout


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (STEPS, f"error: step: got {STEPS}, needs one of the {STEPS} steps of"),
        (3, "error: step: got 3, needs one that"),
    ],
)
def test_a_step_that_is_not_there_is_refused(
    went_on: Path, alone: Commands, tmp_path: Path, step: int, error: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(went_on / "config.yaml", run)
    (done,) = alone.attempt(REPLAY, run, step)
    assert done.status == 2
    assert error in done.stderr
    (done,) = alone.attempt(REPLAY, tmp_path, step)
    assert done.status == 2
    assert "config.yaml: not found, needs the folder of a run" in done.stderr


def test_stopped_by_a_spike(flags: list[object], alone: Commands, went_on: Path, tmp_path: Path) -> None:
    """The step is not recorded, but its incident is, and that is replayed."""
    run = tmp_path / "run"
    (done,) = alone.attempt(TRAINER, *flags, "--on-spike", "stop", "--save-interval", 5, "--save", run)
    assert done.status == DIVERGED, done.stderr
    assert series(run, "lm_loss") == series(went_on, "lm_loss")[:SPIKE]
    facts = json.loads((run / "diverged.json").read_text())
    assert (facts["what"], facts["step"]) == ("loss spike", SPIKE)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("diverged: ")]
    assert line.startswith(f"diverged: the loss spike of step 7 is {facts['value']}, needs at most ")
    (done,) = alone.attempt(REPLAY, run, SPIKE)
    assert done.status == 0, done.stdout + done.stderr


def test_all_processes_skip_the_same_step(flags: list[object], alone: Commands, went_on: Path, tmp_path: Path) -> None:
    """Two stages, two replicas: the checkpoint after the step is the one before it, and one process does the same."""
    run, four, skip = tmp_path / "run", Commands(4), ["--on-spike", "skip"]
    done = four.attempt(TRAINER, *flags, *DP2_PP2.split(), *skip, "--save-interval", 1, "--save", run)
    assert [one.status for one in done] == [0] * 4, done[0].stderr
    assert series(run, "skipped") == series(run, "spike") == [int(step == SPIKE) for step in range(STEPS)]
    (line,) = said_of(done[0].stderr)
    assert "the step is skipped, no weight changed" in line
    assert not any(said_of(one.stderr) for one in done[1:])
    before, after, later = (run / "checkpoints" / folder_name(SPIKE + n) for n in range(3))
    tensors = sorted(file.name for file in before.glob("*.distcp"))
    assert tensors
    for name in tensors:
        assert (before / name).read_bytes() == (after / name).read_bytes(), name
    assert any((after / name).read_bytes() != (later / name).read_bytes() for name in tensors)

    single = tmp_path / "single"
    (one,) = alone.attempt(TRAINER, *flags, *skip, "--save", single)
    assert one.status == 0, one.stderr
    assert relative(series(run, "lm_loss"), series(single, "lm_loss")) < 1e-4
    assert relative(series(run, "lm_loss")[SPIKE + 1 :], series(went_on, "lm_loss")[SPIKE + 1 :]) > 1e-3
    for step in range(SPIKE - 1, SPIKE + 4):  # a step behind the skipped one, from before it
        shutil.rmtree(run / "checkpoints" / folder_name(step))
    done = four.attempt(REPLAY, run, SPIKE + 2)
    assert [one.status for one in done] == [0] * 4, done[0].stdout + done[0].stderr


@pytest.mark.slow
def test_a_resumed_run_knows_the_losses_before_it(
    flags: list[object], alone: Commands, went_on: Path, tmp_path: Path
) -> None:
    """From step 5 on there are two losses to judge step 7 by; the other two are in the metrics."""
    run = tmp_path / "run"
    shutil.copytree(went_on, run)
    shutil.rmtree(run / "incidents")
    begin = run / "checkpoints" / folder_name(5)
    (done,) = alone.attempt(TRAINER, *flags, "--load", begin, "--save", run)
    assert done.status == 0, done.stderr
    assert series(run, "spike") == series(went_on, "spike")
    theirs = json.loads((went_on / "incidents" / "step_0000007" / "incident.json").read_text())
    assert json.loads((run / "incidents" / "step_0000007" / "incident.json").read_text()) == theirs


def test_steps_are_not_skipped_for_ever(flags: list[object], alone: Commands, tmp_path: Path) -> None:
    """A step that has spoilt the weights is followed by losses that are not finite, however often they are skipped."""
    run = tmp_path / "run"
    spoilt = ["--lr", 1e30, "--min-lr", 1e30, "--clip-grad", 0, "--on-non-finite", "skip", "--skip-limit", 3]
    (done,) = alone.attempt(TRAINER, *flags, *spoilt, "--save", run)
    assert done.status == DIVERGED, done.stderr
    records = read_jsonl(run / "metrics.jsonl")
    refused = [record["step"] for record in records if record["skipped"]]
    assert refused == [len(records) - 2, len(records) - 1]
    assert len(list((run / "incidents").iterdir())) == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("diverged: ")]
    assert "needs a finite number in one of skip_limit 3 steps, which were skipped" in line
    assert done.stderr.count("the step is skipped, no weight changed") == 2


@pytest.mark.slow
def test_without_a_folder_the_rows_are_not_kept(flags: list[object], alone: Commands) -> None:
    (done,) = alone.attempt(TRAINER, *flags, "--train-iters", SPIKE + 1)
    assert done.status == 0, done.stderr
    (line,) = said_of(done.stderr)
    assert line.endswith("training goes on; its rows are not kept: no --save folder")
