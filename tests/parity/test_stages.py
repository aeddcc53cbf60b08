"""A run in stages, as a user starts, stops and continues it."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import SmallData
from tests.launcher import Commands
from tests.parity.test_resume import wait_for_steps
from tests.runs import CONFIG, TRAINER, finish, read_jsonl, refused_command, relative, series, start, without_times

STEPS = 3  # of each stage


def written(path: Path, small: SmallData, keep: list[str], **long: Any) -> list[object]:
    """The flags of a run in two stages of a mixture: `short`, then `long`, which has some options of its own."""
    base = yaml.safe_load(Path(CONFIG[1]).read_text())
    base["data"] |= {"data_path": [], "tokenizer_model": str(small.tokenizer), "seq_length": 64}
    base["data"]["mixture"] = [
        {"name": "whole", "prefix": str(small.prefix), "weight": 0.3},
        {"name": "halves", "prefix": str(small.prefix), "weight": 0.7, "length": 32},
    ]
    base["training"] |= {"train_iters": STEPS}
    base["optimizer"] |= {"lr_warmup_iters": 1, "lr_decay_iters": 2 * STEPS}
    base["checkpoint"] = {"save_interval": 1}
    stages = [{"name": "short"}, {"name": "long", "keep": keep} | long]
    path.write_text(yaml.safe_dump(base | {"stages": stages}))
    return ["--config", path, *CONFIG[2:], "--window-schedule", "constant"]


def trace(run: Path) -> list[dict[str, Any]]:
    return without_times([*read_jsonl(run / "short/metrics.jsonl"), *read_jsonl(run / "long/metrics.jsonl")])


def test_two_stages_that_keep_everything_are_one_run(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    flags = written(tmp_path / "run.yaml", small_data, ["optimizer", "learning_rate", "samples"])
    alone.run(TRAINER, *flags, "--save", tmp_path / "staged")
    single = yaml.safe_load((tmp_path / "run.yaml").read_text())
    del single["stages"]
    (tmp_path / "single.yaml").write_text(yaml.safe_dump(single))
    flags[1] = tmp_path / "single.yaml"
    alone.run(TRAINER, *flags, "--save", tmp_path / "single", "--train-iters", 2 * STEPS)
    for key in ("lm_loss", "grad_norm", "learning_rate"):
        staged = [record[key] for record in trace(tmp_path / "staged")]
        assert relative(staged, series(tmp_path / "single", key)) < 1e-6, key


@pytest.mark.slow
def test_a_run_stopped_at_the_border(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """It leaves the same trace."""
    longer = {"data": {"seq_length": 128}, "model": {"rotary_base": 1e6}, "optimizer": {"lr": 1e-3}}
    flags = written(tmp_path / "run.yaml", small_data, [], **longer)
    alone.run(TRAINER, *flags, "--save", tmp_path / "whole")
    early = refused_command(alone, TRAINER, *flags, "--save", tmp_path / "parts", "--stage", "long")
    assert "begins with the weights of short, which has 0 of its 3 steps" in early
    alone.run(TRAINER, *flags, "--save", tmp_path / "parts", "--stage", "short")
    again = refused_command(alone, TRAINER, *flags, "--save", tmp_path / "parts")
    assert "holds the checkpoints of another run" in again
    alone.run(TRAINER, *flags, "--save", tmp_path / "parts", "--load", tmp_path / "parts")
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")
    (tmp_path / "parts" / "short").rename(tmp_path / "moved")  # a stage that was begun from gets no more steps
    flags += ["--save", tmp_path / "parts", "--load", tmp_path / "parts", "--load-if-present"]
    assert "begins with the weights of short, which has 0 of its" in refused_command(alone, TRAINER, *flags)
    assert not (tmp_path / "parts" / "short").exists()
    alone.run(TRAINER, *flags, "--stage", "long")  # nothing is left to do
    (tmp_path / "moved").rename(tmp_path / "parts" / "short")
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


def test_a_stage_ends_with_its_last_evaluation(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """A kill or a warning may come between its last checkpoint and that."""
    run = tmp_path / "run"
    flags = written(tmp_path / "run.yaml", small_data, [], training={"eval_interval": STEPS, "eval_iters": 1})
    flags += ["--eval-interval", STEPS, "--eval-iters", 1, "--save", run, "--load", run, "--load-if-present"]
    alone.run(TRAINER, *flags)
    for stage in ("short", "long"):
        file = run / stage / "evaluation.jsonl"
        whole = file.read_bytes()
        first, last = whole.splitlines(keepends=True)
        file.write_bytes(first)
        alone.run(TRAINER, *flags)
        assert json.loads(file.read_bytes().splitlines()[1]) == json.loads(last)
        assert len(file.read_bytes().splitlines()) == 2
    assert len(trace(run)) == 2 * STEPS


def test_what_a_later_stage_needs(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """It is looked at before the first stage."""
    run = tmp_path / "run"
    for long, message in (
        ({"data": {"mixture": [{"prefix": str(small_data.prefix), "packing": "best_fit"}]}}, "has no best_fit plan"),
        ({"model": {"num_layers": 3}}, "num_layers: got 3; init_from"),
    ):
        flags = written(tmp_path / "run.yaml", small_data, [], **long)
        assert message in refused_command(alone, TRAINER, *flags, "--save", run)
        assert not run.exists()


def test_rows_are_not_taken_twice(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """Batches of another size end at another row."""
    run = tmp_path / "run"
    places = ["--save", run, "--load", run, "--load-if-present"]
    flags = [*written(tmp_path / "run.yaml", small_data, ["samples"]), *places]
    alone.run(TRAINER, *flags, "--stage", "short", "--train-iters", 1)
    larger = ["--global-batch-size", 16, "--override", "global_batch_size"]
    takes = "stages: long: keep: got samples, but short takes those up to 40 and not up to "
    # before the first step with it, and after the last
    assert takes in refused_command(alone, TRAINER, *flags, *larger)
    alone.run(TRAINER, *flags, *larger, "--stage", "short")
    assert takes in refused_command(alone, TRAINER, *flags)
    assert len(read_jsonl(run / "short/metrics.jsonl")) == STEPS
    alone.run(TRAINER, *written(tmp_path / "run.yaml", small_data, [], data={"first_sample": 40}), *places)
    assert len(trace(run)) == 2 * STEPS


@pytest.mark.slow
def test_stopped_inside_the_second_stage(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """One process continues it. The first two also build both stages' groups, one after the other."""
    options = {"data": {"seq_length": 128}, "training": {"train_iters": 40}}
    flags = written(tmp_path / "run.yaml", small_data, ["optimizer"], **options)
    alone.run(TRAINER, *flags, "--save", tmp_path / "whole")
    run = tmp_path / "parts"
    resuming = [*flags[2:], "--load", run, "--load-if-present"]
    began = time.time()
    process = start(["--config", flags[1], *resuming], 2, run)
    wait_for_steps(process, run / "long", began, 5)
    os.killpg(process.agent.pid, signal.SIGTERM)
    finish(process, run)
    done = len(read_jsonl(run / "long/metrics.jsonl"))
    assert 5 <= done < 40
    alone.run(TRAINER, "--config", flags[1], *resuming, "--save", run)
    stopped = trace(run)
    uninterrupted = trace(tmp_path / "whole")
    assert [record["step"] for record in stopped] == [record["step"] for record in uninterrupted]
    for key in ("lm_loss", "grad_norm"):
        assert relative([record[key] for record in stopped], [record[key] for record in uninterrupted]) < 1e-4, key
