"""tools/evaluate.py downstream: lm-eval on a run of ours, exported for it, and on Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint.models import write_model
from evaluation.plain import write_choice
from launcher import Commands

from megatron_ext.evaluation.downstream import SUITES, scores_of

TOOL = "tools/evaluate.py"


@pytest.mark.slow
def test_lm_eval_on_a_run_and_on_folders_side_by_side(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    """The run is the first folder's model, so both answer alike; another model answers otherwise."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    from lm_eval.tasks import TaskManager

    questions = [
        {"question": "Once upon a time, there was a", "choices": [" little girl", " zq xk"], "answer": number % 2}
        for number in range(12)
    ]
    (tmp_path / "choice.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "tasks").mkdir()
    write_choice(tmp_path / "tasks", tmp_path / "choice.jsonl")
    other = write_model(tmp_path / "other", "llama", vocab_size=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((stories_model / name).read_bytes())
    alone.run("tools/convert_checkpoint.py", "hf-to-megatron", "--input", stories_model, "--output", tmp_path / "run")
    models = [stories_model, tmp_path / "run", other]
    flags = ["--tasks", "choice", "--include-path", tmp_path / "tasks", "--limit", 11, "--output", tmp_path / "out"]
    alone.run(TOOL, "downstream", *models, *flags)
    record = json.loads((tmp_path / "out/downstream.json").read_text())
    figures = [model["tasks"]["choice"] for model in record["models"].values()]
    manager = TaskManager(include_path=str(tmp_path / "tasks"))
    direct = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={stories_model},dtype=float32",
        tasks=["choice"],
        limit=11,
        task_manager=manager,
        device="cpu",
    )["results"]["choice"]
    assert figures[0]["acc"] == figures[1]["acc"] == direct["acc,none"] == pytest.approx(6 / 11)  # the girl, always
    assert figures[0]["acc_norm"] == direct["acc_norm,none"]
    alike, unlike = record["comparisons"]
    assert (alike["mcnemar"]["only_first"], alike["mcnemar"]["only_second"]) == (0, 0)
    assert unlike["score"]["value"] == pytest.approx(figures[2]["acc_norm"] - figures[0]["acc_norm"])
    assert {task.name for suite in SUITES.values() for task in suite} <= set(manager.all_tasks)


def test_a_question_counts_once_however_many_filters_its_task_has() -> None:
    strict, flexible = [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]
    answers = [
        {"doc_id": number, "filter": name, "exact_match": score}
        for name, scores in (("strict-match", strict), ("flexible-extract", flexible))
        for number, score in reversed(list(enumerate(scores)))
    ]
    scores = scores_of(answers)
    assert scores is not None
    assert scores.tolist() == strict
    assert scores_of([{"doc_id": 0, "filter": "none", "bleu": 1.0}]) is None
    assert scores_of([]) is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "suite, tasks: needs one of the two"),
        (["--suite", "prolong", "--shots", 2], "shots: got a number beside --suite"),
        (["--tasks", "a", "--limit", 0], "limit: got 0"),
        (["--tasks", "a", "--bos"], "bos, eod_token: lm-eval goes by the tokenizer's own"),
    ],
)
def test_what_cannot_be_done_is_refused(alone: Commands, stories_model: Path, flags: list[object], said: str) -> None:
    (done,) = alone.attempt(TOOL, "downstream", stories_model, *flags)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.status == 2
    assert said in line
