"""Results of an evaluation: one record format, its Markdown tables, and its figure.

A record is JSON:

    kind         the command: perplexity, recall or lm-eval
    settings     the options; only results with equal settings are comparable
    models       name -> {folder, trained_length}
    results      [{model, task, metric, value, count, length?, position?}]
    differences  [{first, second, task, metric, value, low, high, length?, only_first?, only_second?, p_value?}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

Record = Mapping[str, Any]
STYLE: Any = {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the first column is left-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def pivot(results: Iterable[Record], index: Sequence[str], columns: Sequence[str]) -> str:
    """Return a table of values: a row for each combination of `index`, a column for each one of `columns`."""
    cells: dict[tuple[Any, ...], dict[tuple[Any, ...], str]] = {}
    for result in results:
        row = cells.setdefault(tuple(result.get(name, "") for name in index), {})
        row[tuple(result[name] for name in columns if name in result)] = f"{result['value']:.4f}"
    heads = list(dict.fromkeys(head for row in cells.values() for head in row))
    names = [", ".join(map(str, head)) for head in heads]
    return table([*index, *names], [[*key, *(row.get(head, "") for head in heads)] for key, row in cells.items()])


def markdown(record: Record) -> str:
    """Return the tables of a record.

    Raises:
        LookupError, TypeError: it is not a record.
    """
    results, by_position = _split(record)
    settings = "; ".join(f"{name}: {value}" for name, value in record["settings"].items())
    parts = [f"# {record['kind'].capitalize()}", settings, pivot(results, ("task", "metric"), ("model", "length"))]
    beyond = {
        f"{name} was trained on at most {model['trained_length']} tokens"
        for name, model in record["models"].items()
        for result in results
        if result["model"] == name and (result.get("length") or 0) > (model["trained_length"] or float("inf"))
    }
    if beyond:
        parts.append(f"Longer than in training: {'; '.join(sorted(beyond))}.")
    if by_position:
        overall = [result for result in by_position if result["task"] == "all"]
        parts += [
            "## Loss by position",
            "Of the tokens that see at least so many tokens, themselves included, and fewer than twice as many.",
            pivot(overall, ("model", "length"), ("position",)),
        ]
    if record["differences"]:
        head = ["models", "task", "metric", "length", "difference", "95 % interval", "only one right", "p"]
        parts += [
            "## Differences",
            "On the same items; the interval is of paired bootstrap samples. McNemar's exact test is of the items that "
            "one model alone has right.",
            table(head, map(_difference, record["differences"])),
        ]
    return "\n\n".join(parts) + "\n"


def _split(record: Record) -> tuple[list[Record], list[Record]]:
    """Split the results into whole-text results and results by position."""
    results = record["results"]
    return [one for one in results if "position" not in one], [one for one in results if "position" in one]


def _difference(pair: Record) -> list[object]:
    tested = "p_value" in pair
    return [
        f"{pair['second']} - {pair['first']}",
        pair["task"],
        pair["metric"],
        pair.get("length", ""),
        f"{pair['value']:+.4f}",
        "one item" if pair["low"] is None else f"{pair['low']:+.4f} to {pair['high']:+.4f}",
        f"{pair['only_first']} / {pair['only_second']}" if tested else "",
        f"{pair['p_value']:.3g}" if tested else "",
    ]


def draw(record: Record, path: Path) -> bool:
    """Draw values by length, and the loss by position; return whether there was anything to draw."""
    results, by_position = _split(record)
    by_length = [result for result in results if "length" in result and result["metric"] != "perplexity"]
    panels = [panel for panel in ((by_length, "length"), (by_position, "position")) if panel[0]]
    if not panels:
        return False
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
        for axes, (shown, x) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            lines: dict[str, list[Record]] = {}
            for result in shown:
                if x == "length" or result["task"] == "all":
                    key = [result["model"], result["task"] if x == "length" else result["length"]]
                    lines.setdefault(", ".join(map(str, key)), []).append(result)
            for label, line in lines.items():
                axes.plot([one[x] for one in line], [one["value"] for one in line], ".-", label=label)
            axes.set_xscale("log", base=2)
            axes.set(xlabel=f"{x} (tokens)", ylabel=shown[0]["metric"])
            axes.legend(fontsize=7)
        figure.savefig(path, dpi=130, format="png")
    return True
