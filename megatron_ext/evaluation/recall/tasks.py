"""All recall tasks by name: which can be asked with the files that are given, and their samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.text.documents import read_documents
from megatron_ext.errors import UserError
from megatron_ext.evaluation.recall import ruler
from megatron_ext.evaluation.recall.retrieval import JSON_KV, MDQA, SearchQuestion, json_kv, mdqa, read_mdqa
from megatron_ext.evaluation.recall.sample import Sample

logger = logging.getLogger(__name__)

TASKS = (*ruler.TASKS, JSON_KV, MDQA)


@dataclass(frozen=True)
class Material:
    """Holds what the user's files give: RULER's essays and questions, and search results."""

    ruler: ruler.Material
    search: list[SearchQuestion] | None

    def lacks(self, task: str) -> str | None:
        """Say which flag gives what a task needs; None where it is there."""
        if task == MDQA:
            return None if self.search is not None else "--mdqa"
        return self.ruler.lacks(task)


def read_material(
    haystack: Sequence[str] | None, field: str, squad: Path | None, hotpotqa: Path | None, search: Path | None
) -> Material:
    """Read the files that are given.

    Raises:
        UserError: one that cannot be read.
    """
    essay = None
    if haystack is not None:
        essay = ruler.Essay("\n".join(document.text for document in read_documents(haystack, field)))
    questions = {}
    if squad is not None:
        questions["qa_1"] = ruler.read_squad(squad)
    if hotpotqa is not None:
        questions["qa_2"] = ruler.read_hotpotqa(hotpotqa)
    return Material(ruler.Material(essay, questions), None if search is None else read_mdqa(search))


def choose_tasks(wanted: Sequence[str] | None, material: Material) -> list[str]:
    """Return the tasks that are wanted; without a word all that the files allow, the others named in the log.

    Raises:
        UserError: no such task, or one whose file is not given.
    """
    for task in wanted or ():
        if task not in TASKS:
            raise UserError(f"tasks: got {task}, needs some of {', '.join(TASKS)}")
        if flag := material.lacks(task):
            raise UserError(f"tasks: got {task}, which needs a file; give {flag}, or leave the task out")
    if wanted is not None:
        return [task for task in TASKS if task in wanted]
    left_out = {task: flag for task in TASKS if (flag := material.lacks(task))}
    if left_out:
        named = ", ".join(f"{task} ({flag})" for task, flag in left_out.items())
        logger.warning("tasks: left out for want of files: %s", named)
    return [task for task in TASKS if task not in left_out]


def make_samples(
    tasks: Sequence[str],
    lengths: Sequence[int],
    encode: Callable[[str], list[int]],
    material: Material,
    number: int,
    seed: int,
) -> dict[int, list[Sample]]:
    """Make every task's samples at every length; those of MDQA, whose length is its own, at the greatest alone.

    Raises:
        UserError: a task that does not fit a length.
    """

    def count(text: str) -> int:
        return len(encode(text))

    made: dict[int, list[Sample]] = {length: [] for length in lengths}
    for length in lengths:
        for task in tasks:
            own_seed = f"{seed}:{task}:{length}"
            if task == JSON_KV:
                made[length] += json_kv(length, count, number, own_seed)
            elif task != MDQA:
                made[length] += ruler.samples(task, length, count, material.ruler, number, own_seed)
    if MDQA in tasks:
        assert material.search is not None
        made[max(lengths)] += mdqa(material.search, max(lengths), count, number)
    return {length: samples for length, samples in made.items() if samples}
