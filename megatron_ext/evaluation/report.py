"""Evaluations as a reader takes them in: Markdown tables and a figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

STYLE: Any = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
}
Record = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out a Markdown table; the first column is left-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def perplexity_markdown(record: Record) -> str:
    """Write the tables of a perplexity evaluation."""
    models: Record = record["models"]
    lengths = list(next(iter(models.values()))["lengths"])
    mask = "each document alone" if record["document_mask"] else "documents end to end, seen across their borders"
    parts = [
        "# Perplexity",
        f"Document mask: {'yes' if record['document_mask'] else 'no'} ({mask}). Loss is the mean of -log p per token, "
        "in nats; windows of each length score their last tokens, as many as the stride.",
    ]
    rows = [
        [
            name,
            length + (" *" if at["beyond_trained_length"] else ""),
            at["stride"],
            at["tokens"],
            _loss(at),
            f"{at['perplexity']:.3f}",
        ]
        for name, model in models.items()
        for length, at in model["lengths"].items()
    ]
    parts.append(table(["model", "window", "stride", "tokens", "loss", "perplexity"], rows))
    if any(at["beyond_trained_length"] for model in models.values() for at in model["lengths"].values()):
        parts.append("\\* longer than the rows that the model was trained on.")
    sources = list(next(iter(models.values()))["lengths"][lengths[0]]["by_source"])
    if len(sources) > 1:
        rows = [
            [source, name, *(_loss(model["lengths"][length]["by_source"][source]) for length in lengths)]
            for source in sources
            for name, model in models.items()
        ]
        parts += ["## Loss by source", table(["source", "model", *lengths], rows)]
    keys = sorted(
        {int(keys) for model in models.values() for at in model["lengths"].values() for keys in at["by_position"]}
    )
    rows = [
        [name, length, *(_optional(at["by_position"].get(str(key))) for key in keys)]
        for name, model in models.items()
        for length, at in model["lengths"].items()
    ]
    parts += [
        "## Loss by position in the window",
        "Tokens that see at least so many, themselves included, and fewer than twice as many.",
        table(["model", "window", *map(str, keys)], rows),
    ]
    if record["comparisons"]:
        rows = [
            [
                f"{pair['second']} - {pair['first']}",
                pair["window"],
                f"{pair['loss']['value']:+.4f}",
                _span(pair["loss"]),
            ]
            for pair in record["comparisons"]
        ]
        parts += [
            "## Differences",
            "Of the loss, on the same documents; the interval is 95 % of paired bootstrap samples of documents.",
            table(["models", "window", "difference", "interval"], rows),
        ]
    return "\n\n".join(parts) + "\n"


def draw_perplexity(record: Record, path: Path) -> None:
    """Draw perplexity by window length, and the loss by position; a line for each model and length."""
    models: Record = record["models"]
    with _drawn(path, (10, 4), 2) as (by_length, by_position):
        for number, (name, model) in enumerate(models.items()):
            lengths = [int(length) for length in model["lengths"]]
            perplexities = [at["perplexity"] for at in model["lengths"].values()]
            by_length.plot(lengths, perplexities, "o-", color=f"C{number}", label=name)
            for shade, (length, at) in enumerate(model["lengths"].items()):
                keys = [int(key) for key in at["by_position"]]
                opacity = 0.35 + 0.65 * (shade + 1) / len(lengths)
                label = f"{name}, {length}"
                by_position.plot(
                    keys, list(at["by_position"].values()), ".-", color=f"C{number}", alpha=opacity, label=label
                )
        by_length.set(xlabel="window (tokens, log scale)", ylabel="perplexity")
        by_position.set(xlabel="tokens that a token sees (log scale)", ylabel="loss (nats per token)")
        _powers_of_two(by_length, ticks=lengths)
        _powers_of_two(by_position)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def recall_markdown(record: Record) -> str:
    """Write the tables of a recall evaluation: a row for each task, a column for each model and length."""
    parts = [
        "# Recall",
        f"Percent, {_count(record['samples'], 'sample')} of each task; lengths are tokens of prompt and answer "
        "together.",
        _by_task(record["models"]),
        *_paired_scores(record["comparisons"]),
    ]
    return "\n\n".join(parts) + "\n"


def _by_task(models: Record) -> str:
    """Lay out the main figures: a row for each task, a column for each model and length."""
    columns = [(name, length) for name, model in models.items() for length in model["lengths"]]
    at = {(name, length): models[name]["lengths"][length] for name, length in columns}
    tasks = list(dict.fromkeys(task for column in columns for task in at[column]["tasks"]))
    head = ["task", *(f"{name}, {length}" if len(models) > 1 else length for name, length in columns)]

    def cell(column: tuple[str, str], task: str) -> str:
        told = at[column]["tasks"].get(task)  # a task of a length of its own stands in one column
        return "" if told is None else f"{100 * told['score']:.1f}"

    metric = {task: told.get("metric") for column in columns for task, told in at[column]["tasks"].items()}
    named = [f"{task}, {metric[task]}" if metric[task] else task for task in tasks]
    rows: list[list[object]] = [
        [name, *(cell(column, task) for column in columns)] for name, task in zip(named, tasks, strict=True)
    ]
    rows.append(["mean", *(f"{100 * at[column]['mean']:.1f}" for column in columns)])
    return table(head, rows)


def downstream_markdown(record: Record) -> str:
    """Write the tables of lm-eval's figures: a row for each task and metric, a column for each model."""
    models: Record = record["models"]
    names = _metrics(models)
    rows = [
        [task, metric, *(_optional(model["tasks"].get(task, {}).get(metric)) for model in models.values())]
        for task, metric in names
    ]
    settings = "; ".join(
        f"{task['name']}: {'its own' if task['shots'] is None else task['shots']} shots, "
        f"{'all' if task['limit'] is None else task['limit']} questions"
        for task in record["tasks"]
    )
    parts = ["# Downstream tasks", f"By lm-eval. {settings}.", table(["task", "metric", *models], rows)]
    parts += _paired_scores(record["comparisons"])
    return "\n\n".join(parts) + "\n"


def _metrics(models: Record) -> list[tuple[str, str]]:
    """List tasks with their metrics, each once."""
    told = (of for model in models.values() for of in model["tasks"].items())
    return list(dict.fromkeys((task, metric) for task, metrics in told for metric in metrics))


def _paired_scores(comparisons: Sequence[Record]) -> list[str]:
    """Write what differs between models on the same samples."""
    if not comparisons:
        return []
    rows = [
        [
            f"{pair['second']} - {pair['first']}",
            pair.get("length", ""),
            pair["task"],
            f"{100 * pair['score']['value']:+.1f}",
            _span(pair["score"], 100),
            f"{pair['mcnemar']['only_first']} / {pair['mcnemar']['only_second']}",
            f"{pair['mcnemar']['p_value']:.3g}",
        ]
        for pair in comparisons
    ]
    return [
        "## Differences",
        "In percent, on the same samples; the interval is 95 % of paired bootstrap samples. McNemar's exact test is of "
        "samples that one model alone has wholly right.",
        table(["models", "length", "task", "difference", "interval", "only one right", "p"], rows),
    ]


def draw_scores(record: Record, path: Path) -> None:
    """Draw, of recall tasks, the mean by length, and each task's score at the longest."""
    models: Record = record["models"]
    with _drawn(path, (10, 4.5), 2) as (by_length, by_task):
        for number, (name, model) in enumerate(models.items()):
            lengths = [int(length) for length in model["lengths"]]
            by_length.plot(lengths, [100 * at["mean"] for at in model["lengths"].values()], "o-", label=name)
            tasks = model["lengths"][str(max(lengths))]["tasks"]
            places = [place + number * 0.8 / len(models) for place in range(len(tasks))]
            by_task.barh(places, [100 * at["score"] for at in tasks.values()], height=0.8 / len(models), label=name)
            by_task.set_yticks([place + 0.4 - 0.4 / len(models) for place in range(len(tasks))], list(tasks))
        by_task.invert_yaxis()
        by_task.set(xlabel=f"percent at {max(lengths)} tokens", xlim=(0, 100))
        by_length.set(xlabel="tokens (log scale)", ylabel="mean of all tasks (percent)", ylim=(0, 100))
        _powers_of_two(by_length, ticks=lengths)


def draw_downstream(record: Record, path: Path) -> None:
    """Draw each task's figures, a bar for each model."""
    models: Record = record["models"]
    names = _metrics(models)
    with _drawn(path, (8, 1.5 + 0.25 * len(names) * len(models)), 1) as (axes,):
        for number, (name, model) in enumerate(models.items()):
            places = [place + (number + 0.5) * 0.8 / len(models) for place in range(len(names))]
            values = [model["tasks"].get(task, {}).get(metric, 0.0) for task, metric in names]
            axes.barh(places, values, height=0.8 / len(models), label=name)
        axes.set_yticks([place + 0.4 for place in range(len(names))], [f"{task}, {metric}" for task, metric in names])
        axes.invert_yaxis()


@contextmanager
def _drawn(path: Path, size: tuple[float, float], panels: int) -> Iterator[Sequence[Axes]]:
    """Yield panels side by side, of `size` inches together; at the end each has its legend, and the file is written."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        row = figure.subplots(1, panels, squeeze=False)[0]
        yield row
        for axes in row:
            axes.legend(fontsize=7)
        figure.savefig(path, dpi=130, format="png")


def _powers_of_two(axes: Axes, ticks: Sequence[int] | None = None) -> None:
    axes.set_xscale("log", base=2)
    if ticks is not None:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}K" if value >= 1024 else f"{value:g}")
    )
    axes.xaxis.set_minor_locator(NullLocator())


def _loss(at: Record) -> str:
    return f"{at['loss']:.4f}"


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _span(interval: Record, factor: float = 1.0) -> str:
    if interval["low"] is None:
        return "one item"
    digits = 4 if factor == 1.0 else 1
    return f"{factor * interval['low']:+.{digits}f} to {factor * interval['high']:+.{digits}f}"
