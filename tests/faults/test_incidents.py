"""A loss spike is recorded, skipped by all processes, or ends the run; its rows can be printed afterwards."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_ext.checkpoint.folders import folder_name
from megatron_ext.run.signals import DIVERGED
from tests.faults.test_kills import checksums
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER, read_jsonl, relative, series
from tests.theirs import write_theirs

INSPECT = "tools/inspect_step.py"
LENGTH = 32
STEPS = 16
SPIKE = 7
GARBAGE = 8  # token ids from here on are in one document alone
DP2_PP2 = "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Documents that count from 0 to 7 repeatedly, and one of random tokens, which step SPIKE reads."""
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
def with_spike(flags: list[object], alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that trains on the spike, which is recorded and logged."""
    run = tmp_path_factory.mktemp("with_spike") / "run"
    trajectory = ["--dump-trajectory", run / "trajectory", "--save-interval", 5]
    (done,) = alone.run(TRAINER, *flags, *trajectory, "--save", run)
    assert series(run, "spike") == [int(step == SPIKE) for step in range(STEPS)]
    assert series(run, "skipped") == [0] * STEPS
    losses = series(run, "lm_loss")
    before = losses[SPIKE - 4 : SPIKE]
    bound = np.mean(before) + 4 * np.std(before)
    assert losses[SPIKE] > bound
    (line,) = spike_lines(done.stderr)
    assert f"the loss spike of step 7 is {losses[SPIKE]:.4f}, needs at most {bound:.4f}; training continues" in line
    return run


def spike_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "loss spike" in line]


def inspected(alone: Commands, run: Path, step: int) -> tuple[str, list[tuple[str, ...]]]:
    """The heading, and a tuple for each document: loss, trained tokens, sample, first and last token, text."""
    (done,) = alone.run(INSPECT, run, step, "--characters", 10_000)
    line = r"loss (\S+) of (\d+) tokens, sample (\d+), tokens (\d+)\.\.(\d+): '(.*)'"
    return done.stdout.partition("\n")[0], re.findall(line, done.stdout)


def test_the_rows_of_the_step_are_printed(with_spike: Path, alone: Commands) -> None:
    """The planted document has the largest loss; weights come from step 5, and before it the first ones."""
    heading, documents = inspected(alone, with_spike, SPIKE)
    assert heading.endswith(str(with_spike / "checkpoints" / folder_name(5)))
    trained = np.load(with_spike / "trajectory" / "step_000007.npz")
    samples = {int(sample) for _, _, sample, *_ in documents}
    assert samples == set(range(4 * SPIKE, 4 * SPIKE + 4))
    assert sum(int(count) for _, count, *_ in documents) == trained["loss_mask"].sum()
    for _, _, sample, first, last, text in documents:
        row = trained["tokens"][int(sample) - 4 * SPIKE]
        assert [int(word) for word in text.split()] == row[int(first) : int(last) + 1].tolist()
    assert any(int(word) >= GARBAGE for word in documents[0][-1].split())
    assert float(documents[0][0]) > 1.5 * float(documents[-1][0])
    heading, documents = inspected(alone, with_spike, 0)
    assert heading.endswith("the first weights of the run")
    losses, counts = zip(*((float(loss), int(count)) for loss, count, *_ in documents), strict=True)
    assert np.average(losses, weights=counts) == pytest.approx(series(with_spike, "lm_loss")[0], 1e-4)


def test_the_first_weights_of_a_run_of_an_earlier_version(
    flags: list[object], alone: Commands, with_spike: Path, tmp_path: Path
) -> None:
    """Its config.yaml names them, and its history does not."""
    alone.run(TRAINER, *flags, "--train-iters", 1, "--init-from", with_spike, "--save", tmp_path)
    config, history = tmp_path / "config.yaml", tmp_path / "history.jsonl"
    values = yaml.safe_load(config.read_text())
    values["checkpoint"]["init_from"] = str(with_spike)
    config.write_text(yaml.safe_dump(values))
    lines = [{name: value for name, value in line.items() if name != "init_from"} for line in read_jsonl(history)]
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, documents = inspected(alone, tmp_path, 0)
    losses, counts = zip(*((float(loss), int(count)) for loss, count, *_ in documents), strict=True)
    assert np.average(losses, weights=counts) == pytest.approx(series(tmp_path, "lm_loss")[0], abs=1e-4)


def test_a_branch_without_a_checkpoint_has_the_weights_it_began_with(
    flags: list[object], alone: Commands, with_spike: Path, tmp_path: Path
) -> None:
    start = with_spike / "checkpoints" / folder_name(5)
    alone.run(TRAINER, *flags, "--train-iters", 7, "--load", start, "--override", "train_iters", "--save", tmp_path)
    heading, documents = inspected(alone, tmp_path, 5)
    assert heading.endswith(str(start))
    losses, counts = zip(*((float(loss), int(count)) for loss, count, *_ in documents), strict=True)
    assert np.average(losses, weights=counts) == pytest.approx(series(tmp_path, "lm_loss")[0], abs=1e-4)


def test_a_step_before_an_override_has_its_own_options(flags: list[object], alone: Commands, tmp_path: Path) -> None:
    common = [*flags, "--save", tmp_path, "--lr-decay-iters", 9]
    alone.run(TRAINER, *common, "--train-iters", 4)
    more = ["--load", tmp_path, "--train-iters", 6, "--global-batch-size", 8, "--override", "global_batch_size"]
    alone.run(TRAINER, *common, *more)
    for step, samples in ((2, range(8, 12)), (3, range(12, 16)), (4, range(16, 24))):
        _, documents = inspected(alone, tmp_path, step)
        assert {int(sample) for _, _, sample, *_ in documents} == set(samples)


def test_a_spike_stops_the_run(flags: list[object], alone: Commands, with_spike: Path, tmp_path: Path) -> None:
    """The step is not recorded, but its rows can be printed."""
    run = tmp_path / "run"
    (done,) = alone.attempt(TRAINER, *flags, "--on-spike", "stop", "--save-interval", 5, "--save", run)
    assert done.status == DIVERGED, done.stderr
    assert series(run, "lm_loss") == series(with_spike, "lm_loss")[:SPIKE]
    facts = json.loads((run / "diverged.json").read_text())
    assert (facts["what"], facts["step"]) == ("loss spike", SPIKE)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("diverged: ")]
    assert line.startswith(f"diverged: the loss spike of step 7 is {facts['value']}, needs at most ")
    _, documents = inspected(alone, run, SPIKE)
    assert {int(sample) for _, _, sample, *_ in documents} == set(range(4 * SPIKE, 4 * SPIKE + 4))


def test_all_processes_skip(flags: list[object], alone: Commands, with_spike: Path, tmp_path: Path) -> None:
    """The checkpoint after the step equals the one before it with PP 2 and DP 2; a single process does the same."""
    run = tmp_path / "run"
    four_processes = Commands(4)
    skip = ["--on-spike", "skip"]
    done = four_processes.run(TRAINER, *flags, *DP2_PP2.split(), *skip, "--save-interval", 1, "--save", run)
    assert series(run, "skipped") == series(run, "spike") == [int(step == SPIKE) for step in range(STEPS)]
    (line,) = spike_lines(done[0].stderr)
    assert "the step is skipped, no weight changed" in line
    assert not any(spike_lines(process.stderr) for process in done[1:])
    before, after, later = (checksums(run, SPIKE + n) for n in range(3))
    assert before == after != later

    single = tmp_path / "single"
    alone.run(TRAINER, *flags, *skip, "--save", single)
    assert relative(series(run, "lm_loss"), series(single, "lm_loss")) < 1e-4
    assert relative(series(run, "lm_loss")[SPIKE + 1 :], series(with_spike, "lm_loss")[SPIKE + 1 :]) > 1e-3


def test_skipped_steps_are_limited(flags: list[object], alone: Commands, tmp_path: Path) -> None:
    """After a step that made the weights unusable, no loss is finite, however many steps are skipped."""
    run = tmp_path / "run"
    spoilt = ["--lr", 1e30, "--min-lr", 1e30, "--clip-grad", 0, "--on-non-finite", "skip", "--skip-limit", 3]
    (done,) = alone.attempt(TRAINER, *flags, *spoilt, "--save", run)
    assert done.status == DIVERGED, done.stderr
    records = read_jsonl(run / "metrics.jsonl")
    refused = [record["step"] for record in records if record["skipped"]]
    assert refused == [len(records) - 2, len(records) - 1]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("diverged: ")]
    assert "needs a finite number in one of skip_limit 3 steps, which were skipped" in line
    assert done.stderr.count("the step is skipped, no weight changed") == 2
