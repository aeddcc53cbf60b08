"""lm-eval of the model in training: the scores of its checkpoint, and a run that does not notice."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_ext.monitoring.report import charts, load_run
from tests.conftest import SmallData
from tests.launcher import Commands
from tests.parity.test_layouts import CP2, EP2, FULL, OVERLAPS, TP2_SP, VPP2
from tests.runs import CONFIG, TRAINER, launch, refusal, without_times
from tests.tools.test_evaluate_lm_eval import TASKS, write_tasks

pytestmark = pytest.mark.slow  # `make test-eval` runs them
LAYOUTS = {
    "tp2 sp pp2 vpp2": (f"{TP2_SP} {VPP2}", 4),
    "cp2 recompute": (f"{CP2} {FULL}", 2),
    "experts over dp2": (f"--num-experts 4 --moe-router-topk 2 {EP2}", 2),
    "dp2 distributed overlaps, bf16": (f"{OVERLAPS} --bf16", 2),
}


def flags_of(data: SmallData, tasks: Path) -> list[object]:
    return [*data.flags, "--lm-eval-interval", 2, "--lm-eval-tasks", *TASKS, "--lm-eval-include-path", tasks]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_checkpoint(
    layout: str, small_data: SmallData, alone: Commands, tmp_path: Path
) -> None:
    """Losses are the same bit for bit with and without lm-eval, also with dropout: random states are restored."""
    words, processes = LAYOUTS[layout]
    steps = "--train-iters 4 --hidden-dropout 0.1 --num-layers 4 --lr 1e-2 --lr-warmup-iters 0"
    flags = [*words.split(), *steps.split()]
    tasks = write_tasks(tmp_path / "tasks")
    run = launch([*flags_of(small_data, tasks), *flags], processes, tmp_path / "with")
    plain = launch([*small_data.flags, *flags], processes, tmp_path / "without")
    assert without_times(run.metrics) == without_times(plain.metrics)
    assert [record["step"] for record in run.evaluations] == [0, 2, 4]
    dtype = "bfloat16" if "bf16" in layout else "float32"
    settings = ["--include-path", tasks, "--output", tmp_path / "out", "--dtype", dtype]
    alone.run("tools/evaluate.py", "lm-eval", run.folder, "--tasks", *TASKS, *settings)
    results = json.loads((tmp_path / "out" / "lm-eval.json").read_text())["results"]
    scores = {f"{result['task']}/{result['metric']}": result["value"] for result in results}
    assert run.evaluations[-1]["lm_eval"] == pytest.approx(scores, rel=1e-2 if dtype == "bfloat16" else 1e-4)
    assert run.evaluations[0]["lm_eval"]["text/word_perplexity"] > scores["text/word_perplexity"]  # it has learned
    shown = {title: len(figure.data) for title, figure in charts([load_run(run.folder)]).items() if "lm-eval" in title}
    assert shown == Counter(f"lm-eval: {result['metric']}" for result in results)


@pytest.mark.parametrize(
    "steps",
    ["--train-iters 2", "--train-iters 9 --eval-interval 1 --early-stopping-patience 1 --early-stopping-delta 9"],
)
def test_a_resumed_run_runs_what_was_interrupted(
    steps: str, small_data: SmallData, alone: Commands, tmp_path: Path
) -> None:
    """The tasks also run after the last step of a run that stops early, at which no interval ends."""
    flags = [*CONFIG, *flags_of(small_data, write_tasks(tmp_path / "tasks")), "--lr-warmup-iters", 0, *steps.split()]
    flags += ["--save", tmp_path / "run"]
    alone.run(TRAINER, *flags)
    file = tmp_path / "run" / "evaluation.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert "lm_eval" in lines[-1]
    for kept in lines[:-1], lines:  # interrupted before its record, or not
        file.write_text("".join(kept))
        alone.run(TRAINER, *flags, "--load", tmp_path / "run")
        assert file.read_text().splitlines(keepends=True) == lines


def test_an_unknown_task_is_refused_before_training(small_data: SmallData, tmp_path: Path) -> None:
    """Every process refuses it, so that a launcher does not take the others' end for a crash."""
    flags = ["--lm-eval-interval", 2, "--lm-eval-tasks", "no_such_task", "--save", tmp_path / "run"]
    first, second = Commands(2).attempt(TRAINER, *CONFIG, *small_data.flags, *flags)
    assert "no_such_task cannot be run" in refusal(first)
    assert second.status == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
