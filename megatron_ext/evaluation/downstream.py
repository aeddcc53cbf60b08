"""Standard tasks by lm-eval, on Hugging Face folders: the papers' task lists, or any of its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.arrays import Float64
from megatron_ext.errors import UserError, first_line, missing_package
from megatron_ext.evaluation.statistics import difference, mcnemar

MAIN = ("acc_norm", "acc", "exact_match", "em", "f1")  # by which models are compared: the first that a task has


@dataclass(frozen=True)
class Task:
    """Names a task of lm-eval and its setting.

    Attributes:
        shots: solved examples before a question; None for the task's own.
        limit: questions; None for all.
    """

    name: str
    shots: int | None = None
    limit: int | None = None


_OLMES = (
    *("hellaswag", "arc_easy", "arc_challenge", "winogrande", "commonsense_qa", "openbookqa", "piqa", "social_iqa"),
    "mmlu",
)
SUITES = {
    # OLMES's nine tasks with 5 shots and 1,000 questions, in lm-eval's wording
    "skyladder": tuple(Task(name, 5, None if name == "mmlu" else 1000) for name in _OLMES),
    # short tasks with the shots of the Open LLM Leaderboard
    "prolong": (
        Task("hellaswag", 10),
        Task("mmlu", 5),
        Task("arc_challenge", 25),
        Task("winogrande", 5),
        Task("gsm8k", 5),
    ),
    # BBH with the chains of thought that lm-eval brings
    "token-weighting": (Task("mmlu", 5), Task("bbh_cot_fewshot")),
}


@dataclass(frozen=True, eq=False)
class Answered:
    """Holds a model's results.

    Attributes:
        figures: metrics of each task and group, by name.
        items: of each task's main metric, float64 [questions].
    """

    figures: dict[str, dict[str, float]]
    items: dict[str, Float64]


def run_tasks(
    folder: Path, tasks: Sequence[Task], *, include: Path | None, dtype: str, batch_size: int, device: str
) -> Answered:
    """Run lm-eval on a Hugging Face folder.

    Args:
        folder: the model.
        tasks: of lm-eval's, or of `include`.
        include: folder with task files of one's own.
        dtype: float32 or bfloat16.
        batch_size: questions at a time.
        device: cpu or cuda.

    Raises:
        UserError: lm-eval is not installed, does not know a task, or cannot get its data.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise missing_package("downstream", "lm-eval[hf]") from None
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = sorted({task.name for task in tasks} - set(manager.all_tasks))
    if unknown:
        raise UserError(f"tasks: lm-eval has no {unknown[0]}; `lm-eval ls tasks` lists them, --include-path adds some")
    figures: dict[str, dict[str, float]] = {}
    items: dict[str, Float64] = {}
    settings = dict.fromkeys((task.shots, task.limit) for task in tasks)
    for setting in settings:
        group = [task for task in tasks if (task.shots, task.limit) == setting]
        try:
            found = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder), "dtype": dtype},
                tasks=[task.name for task in group],
                num_fewshot=group[0].shots,
                limit=group[0].limit,
                batch_size=batch_size,
                device=device,
                task_manager=manager,
                log_samples=True,
            )
        except (OSError, ValueError) as error:
            named = ", ".join(task.name for task in group)
            raise UserError(
                f"downstream: lm-eval cannot run {named} ({first_line(error)[:200]}); offline, data sets must be in "
                "Hugging Face's cache, or files that a task of --include-path names"
            ) from None
        for name, metrics in (found["results"] | found.get("groups", {})).items():
            figures[name] = {
                key.removesuffix(",none"): float(value)
                for key, value in metrics.items()
                if isinstance(value, (int, float)) and "stderr" not in key and "," in key
            }
        for name, answers in found["samples"].items():
            scores = scores_of(answers)
            if scores is not None:
                items[name] = scores
    return Answered(figures, items)


def scores_of(answers: Sequence[Mapping[str, Any]]) -> Float64 | None:
    """Return the main figure of each question of a task, by the task's first filter; None where it has no such figure.

    Args:
        answers: what lm-eval logs: a question once for each filter, as gsm8k's strict-match and flexible-extract.
    """
    main = next((metric for metric in MAIN if answers and metric in answers[0]), None)
    if main is None:
        return None
    own = [answer for answer in answers if answer.get("filter") == answers[0].get("filter")]
    return np.array([float(answer[main]) for answer in sorted(own, key=lambda answer: int(answer["doc_id"]))])


def task_differences(models: Mapping[str, Answered]) -> Iterator[dict[str, Any]]:
    """Compare each model with the first one, question by question."""
    (first, base), *others = models.items()
    for second, other in others:
        for task in base.items:
            a, b = base.items[task], other.items[task]
            yield {
                "first": first,
                "second": second,
                "task": task,
                "score": difference(a, b).record(),
                "mcnemar": mcnemar(a == 1.0, b == 1.0).record(),
            }
