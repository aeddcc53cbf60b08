"""Results of an evaluation: one record format, comparisons of models by paired bootstrap, and Markdown tables.

A record is JSON:

    kind         the command: perplexity or lm-eval
    settings     the options; only results with equal settings are comparable
    models       name -> {folder, trained_length}
    results      [{model, task, metric, value, count, length?, position?}]
    differences  [{first, second, task, metric, value, low, high, length?}]
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.arrays import Float64
from megatron_ext.files.atomic import atomic_write

Record = Mapping[str, Any]
Key = tuple[str, str, int | None]  # task, metric, and length or None
RESAMPLES = 5000


def difference(first: Float64, second: Float64, weights: Float64 | None = None, seed: int = 0) -> dict[str, Any]:
    """Estimate the difference of two means by a paired bootstrap over the items.

    Args:
        first, second: float64 [items], sums over each item, such as the losses of a document's tokens.
        weights: float64 [items], number of terms in each sum, such as the document's tokens; None for 1 each.
        seed: of the resampling.

    Returns:
        value: sum(second - first) / sum(weights); low, high: its 95 % interval, None for a single item.
    """
    sums = second - first
    n = len(first)
    if weights is None:
        weights = np.ones(n)
    value = float(sums.sum() / weights.sum())
    if n < 2:
        return {"value": value, "low": None, "high": None}
    generator = np.random.default_rng(seed)
    draws = (generator.integers(0, n, n) for _ in range(RESAMPLES))
    low, high = np.quantile([sums[draw].sum() / weights[draw].sum() for draw in draws], [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high)}


def compare(
    models: Mapping[str, Mapping[Key, Float64]], weights: Mapping[Key, Float64] | None = None
) -> Iterator[dict[str, Any]]:
    """Compare each model with the first one, on the same items.

    `models` has the scores of each model, float64 [items] by key; `weights` are as in `difference`, also by key.
    """
    (first, first_scores), *later_models = models.items()
    for second, second_scores in later_models:
        for key, scores in first_scores.items():
            if key not in second_scores or len(second_scores[key]) != len(scores):
                continue
            task, metric, length = key
            entry: dict[str, Any] = {"first": first, "second": second, "task": task, "metric": metric}
            if length is not None:
                entry["length"] = length
            yield entry | difference(scores, second_scores[key], (weights or {}).get(key))


def write_record(record: Record, items: Mapping[str, Iterable[Record]], folder: Path) -> None:
    """Write the record, its tables and all answers to a folder; the record last, so that with it all are there."""
    contents = {}
    if items:
        answers = [{"model": name, **item} for name in items for item in items[name]]
        lines = [json.dumps(answer, ensure_ascii=False, default=str) + "\n" for answer in answers]
        contents[".items.jsonl"] = "".join(lines)
    contents |= {".md": markdown(record), ".json": json.dumps(_in_json(record), indent=2) + "\n"}
    for ending, content in contents.items():
        with atomic_write(folder / (record["kind"] + ending)) as aside:
            # incomplete characters of answers are written as JSON escapes
            aside.write_text(content, encoding="utf-8", errors="backslashreplace")


def _in_json(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _in_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(entry) for entry in value]
    return value


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table that is legible as text; the first column is left-aligned."""
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (head, *rows)]
    name_width, *widths = (max(3, *map(len, column)) for column in zip(*lines, strict=True))
    lines.insert(1, ["-" * name_width, *("-" * (width - 1) + ":" for width in widths)])
    padded = ([name.ljust(name_width), *map(str.rjust, cells, widths)] for name, *cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def _shown(value: float | None, sign: str = "") -> str:
    """Format a number, which is null in a file if it is not a number."""
    return f"{math.nan if value is None else value:{sign}.4f}"


def pivot(results: Iterable[Record], index: Sequence[str], columns: Sequence[str]) -> str:
    """Return a table of values: a row for each combination of `index`, a column for each one of `columns`."""
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for result in results:
        row = cells.setdefault(tuple(result.get(name, "") for name in index), {})
        row[", ".join(str(result[name]) for name in columns if name in result)] = _shown(result["value"])
    heads = list(dict.fromkeys(head for row in cells.values() for head in row))
    return table([*index, *heads], [[*key, *(row.get(head, "") for head in heads)] for key, row in cells.items()])


def markdown(record: Record) -> str:
    """Return the tables of a record."""
    settings = "; ".join(f"{name}: {value}" for name, value in record["settings"].items() if value is not None)
    results = [result for result in record["results"] if "position" not in result]
    by_position = [result for result in record["results"] if "position" in result and result["task"] == "all"]
    parts = [f"# {record['kind'].capitalize()}", settings, pivot(results, ("task", "metric"), ("model", "length"))]
    if by_position:
        parts += [
            "## Loss by position",
            "The mean over tokens that see at least so many tokens, themselves included, and fewer than twice as many.",
            pivot(by_position, ("model", "length"), ("position",)),
        ]
    if record["differences"]:
        rows: list[list[object]] = []
        for pair in record["differences"]:
            models = f"{pair['second']} - {pair['first']}"
            interval = "one item"
            if pair["low"] is not None:
                interval = f"{_shown(pair['low'], '+')} to {_shown(pair['high'], '+')}"
            value = _shown(pair["value"], "+")
            rows.append([models, pair["task"], pair["metric"], pair.get("length", ""), value, interval])
        parts += [
            "## Differences",
            "On the same items; the interval is of paired bootstrap samples.",
            table(["models", "task", "metric", "length", "difference", "95 % interval"], rows),
        ]
    return "\n\n".join(parts) + "\n"
