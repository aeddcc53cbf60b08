"""What `tools/evaluate.py` has measured of a run's models, as the tables of a page.

    RUN/evaluations/**/perplexity.json, recall.json, ...     kept beside the run: --output RUN/evaluations
    DIR/**/perplexity.json, ...                              given to the report

Models that were asked the same, in one command or in several, stand side by side in one table. Differences have
intervals and tests where one command has asked both models: there they are paired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from megatron_ext.errors import UserError
from megatron_ext.evaluation.report import (
    downstream_markdown,
    perplexity_markdown,
    recall_markdown,
)

FOLDER = "evaluations"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class _Kind:
    """Says how the records of a command become text, and which of them asked the same.

    Attributes:
        markdown: writes a record.
        asked: tells what a model of a record was asked.
        needs: fields without which a record does not say how.
    """

    markdown: Callable[[Record], str]
    asked: Callable[[Mapping[str, Any]], Any]
    needs: tuple[str, ...]


def _windows(model: Mapping[str, Any]) -> Any:
    return {length: [at["stride"], at["tokens"], list(at["by_source"])] for length, at in model["lengths"].items()}


def _samples(model: Mapping[str, Any]) -> Any:
    return {
        length: {task: told["samples"] for task, told in at["tasks"].items()} for length, at in model["lengths"].items()
    }


_KINDS = {
    "perplexity": _Kind(perplexity_markdown, _windows, ("document_mask",)),
    "recall": _Kind(recall_markdown, _samples, ("samples", "seed")),
    "downstream": _Kind(downstream_markdown, lambda model: sorted(model["tasks"]), ("tasks",)),
}


def _terms(kind: str, record: Record) -> str:
    """Tell a record's terms from others': all that it says but of its models, and what they were asked.

    Raises:
        LookupError: no model, or nothing about how they were asked.
    """
    if not record["models"]:
        raise LookupError("no model")
    if lacks := [name for name in _KINDS[kind].needs if name not in record]:
        raise LookupError(f"no {lacks[0]}")
    how = {name: value for name, value in record.items() if name not in ("models", "comparisons")}
    asked = {json.dumps(_KINDS[kind].asked(model), sort_keys=True) for model in record["models"].values()}
    return json.dumps([kind, how, sorted(asked)], sort_keys=True)


@dataclass(frozen=True)
class Evaluation:
    """Holds what one command has left: `path` of its JSON, and the record in it."""

    path: Path
    record: Record

    @property
    def kind(self) -> str:
        """The command's name."""
        return self.path.stem


def evaluations_of(runs: Iterable[Path], given: Sequence[Path]) -> list[Evaluation]:
    """Read the evaluations beside runs and those in given folders, each file once, by kind and path.

    Raises:
        UserError: a given folder without an evaluation, or a file that is none.
    """
    paths: dict[Path, Path] = {}
    for run in runs:
        paths |= {path.resolve(): path for path in _files(run / FOLDER)}
    for folder in given:
        found = list(_files(folder))
        if not found:
            raise UserError(
                f"evaluations: got {folder}, which holds no {', '.join(f'{kind}.json' for kind in _KINDS)}; give what "
                "tools/evaluate.py got as --output"
            )
        paths |= {path.resolve(): path for path in found}
    return sorted((_read(path) for path in paths.values()), key=lambda one: (list(_KINDS).index(one.kind), one.path))


def _files(folder: Path) -> Iterator[Path]:
    for kind in _KINDS:
        yield from sorted(folder.rglob(f"{kind}.json"))


def _read(path: Path) -> Evaluation:
    try:
        evaluation = Evaluation(path, json.loads(path.read_text(encoding="utf-8")))
        _markdown(evaluation.kind, evaluation.record)  # all that a table reads is there
        _terms(evaluation.kind, evaluation.record)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"evaluations: {path} is no record of tools/evaluate.py {path.stem} ({type(error).__name__}: {error}); "
            "evaluate again, or move it away"
        ) from None
    return evaluation


def evaluation_texts(evaluations: Sequence[Evaluation]) -> list[str]:
    """Write evaluations as HTML, one text for all of a kind that asked the same; text of theirs is escaped."""
    groups: dict[str, list[Evaluation]] = {}
    for one in evaluations:
        groups.setdefault(_terms(one.kind, one.record), []).append(one)
    page = MarkdownIt("js-default").disable(["link", "image", "autolink"])
    # headings go a level down: the page has its own
    return [page.render(re.sub("^#", "##", _joined(group), flags=re.MULTILINE)) for group in groups.values()]


def _joined(group: Sequence[Evaluation]) -> str:
    """Write the tables of one group, with where they come from."""
    models: dict[str, Any] = {}
    comparisons: list[Any] = []
    for one in group:
        names = {name: _unlike(name, model, one.path, models) for name, model in one.record["models"].items()}
        models |= {names[name]: model for name, model in one.record["models"].items()}
        for pair in one.record["comparisons"]:
            comparisons.append({**pair, "first": names[pair["first"]], "second": names[pair["second"]]})
    parts = [_markdown(group[0].kind, {**group[0].record, "models": models, "comparisons": comparisons})]
    if len(group) > 1:
        parts.append("Of several evaluations: a difference has an interval where one command has asked both models.\n")
    files = ", ".join(f"`{one.path}`" for one in group)
    return "\n".join([*parts, f"From {files}.\n"])


def _unlike(name: str, model: Any, path: Path, others: Mapping[str, Any]) -> str:
    """Name a model so that no other one of the table has the name; the same numbers are the same model."""
    return name if others.get(name, model) == model else f"{name} ({path.parent})"


def _markdown(kind: str, record: Record) -> str:
    return _KINDS[kind].markdown(record)
