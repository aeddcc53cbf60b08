"""Writes pages: of a run `report.html` and `report.png`; of several one HTML page or PNG that overlays them."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError, installed_version
from megatron_ext.inspect.passage import INK, MARK_ALPHA, ZERO_INK, view_passage
from megatron_ext.monitoring.charts import comparison_charts, run_charts
from megatron_ext.monitoring.evaluations import evaluation_texts, evaluations_of
from megatron_ext.monitoring.figures import draw_comparison, draw_run, write_png
from megatron_ext.monitoring.mixture import drawn_mixture
from megatron_ext.monitoring.panels import RUN_COLOURS, short_number
from megatron_ext.monitoring.runs import (
    Run,
    Summary,
    load_run,
    load_runs,
    paired_differences,
    summarise,
    unlike_evaluations,
)
from megatron_ext.pages.colours import PAGE_COLOURS
from megatron_ext.pages.page import write_page

PNG_FILE, HTML_FILE = "report.png", "report.html"
HERE = Path(__file__).parent
DPI = 160
PACKAGES = (
    "megatron_ext",
    "megatron-core",
    "torch",
    "transformer-engine",
    "flash-attn",
    "numpy",
    "matplotlib",
)

Rows = list[tuple[str, str]]

_MOST_NAMED = 6  # data sets; the configuration has them all
NONE = "\N{EN DASH}"  # where a run has no such number


def write_report(run_folder: Path | str, evaluations: Sequence[Path] = ()) -> Path:
    """Write `report.png` and the self-contained `report.html` into the run folder; returns the HTML's path.

    Works on a run that is still training, was resumed or was killed.

    Args:
        run_folder: what training got as --save.
        evaluations: what tools/evaluate.py got as --output, beside those in RUN/evaluations.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt, or an evaluation is.
    """
    run = load_run(run_folder)
    texts = evaluation_texts(evaluations_of([run.folder], evaluations))
    write_png(lambda: draw_run(run), run.folder / PNG_FILE, DPI)
    return write_page(run.folder / HTML_FILE, HERE / "report.html.jinja", **_page(run), evaluations=texts)


def write_comparison(run_folders: Sequence[Path | str], output: Path | str, evaluations: Sequence[Path] = ()) -> Path:
    """Lay several runs on each other in `output`, an .html page with tables, or a .png; returns its path.

    Args:
        run_folders: what trainings got as --save.
        output: where to write.
        evaluations: as of `write_report`; those beside any of the runs are shown too.

    Raises:
        UserError: a folder given twice, a run without metrics, a damaged evaluation, or `output` is neither.
    """
    output = Path(output)
    if output.suffix.lower() not in (".png", ".html"):
        raise UserError(f"output: got {str(output)!r}, needs a file name that ends in .html or .png; give one")
    if output.suffix.lower() == ".png":
        return write_png(lambda: draw_comparison(load_runs(run_folders)), output, DPI)
    runs = load_runs(run_folders)
    texts = evaluation_texts(evaluations_of([run.folder for run in runs], evaluations))
    return write_page(output, HERE / "comparison.html.jinja", **_comparison(runs), evaluations=texts)


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the page of several runs holds: a table, what of their differences is significant, and charts."""
    first, summaries = runs[0], [summarise(run) for run in runs]
    rows: list[tuple[str, list[str]]] = []
    for label, texts in zip(*_compared(summaries), strict=True):
        if any(text != NONE for text in texts):
            rows.append((label, texts))
    lengths = [run.final_by_length() for run in runs]
    known = sorted({length for losses in lengths for length in losses})
    for place, length in enumerate(known if len(known) > 1 else (), start=1):  # below the loss at each run's longest
        rows.insert(place, (f"Final validation loss at {length:,}", [_decimals(at.get(length)) for at in lengths]))
    rows.insert(0, ("Status", [run.history.status for run in runs]))
    notes = []
    for run in runs[1:]:
        found = paired_differences(first, run)
        if found is None:
            notes.append(f"{run.name} and {first.name} have fewer than 20 steps in common.")
            continue
        mean, width = found.last_tenth
        verdict = "significant" if abs(mean) > width else "not significant"
        notes.append(
            f"Training loss of {run.name} less that of {first.name}, over the last tenth of their common steps: "
            f"{mean:+.4f} ± {width:.4f} nats (95 % interval of the mean, paired by step, steps taken as independent of "
            f"each other): {verdict}."
        )
    unlike = unlike_evaluations(runs)
    if unlike is not None:
        notes.append(unlike)
    return {
        "title": f"Comparison of {len(runs)} runs",
        "names": [run.name for run in runs],
        "colours": [f"var(--{PAGE_COLOURS[colour]})" for colour in RUN_COLOURS],
        "rows": rows,
        "notes": notes,
        "charts": list(comparison_charts(runs)),
    }


def _compared(summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Return the labels of a comparison's rows, and the text of each run in each row."""
    columns = [
        {
            "Final validation loss": _at_step(one.final_validation),
            "Best validation loss": _at_step(one.best_validation),
            "Last training loss": _decimals(one.final_train_loss),
            "Completed steps": f"{one.completed_steps:,}",
            "Tokens": _whole(one.tokens),
            "FLOPs": _count(one.flops),
            "Time in training steps": _duration(one.seconds),
            "Time saved against the last window": _share(one.time_saved),
            "FLOPs saved against the last window": _share(one.flops_saved),
            "Median tokens/s": _whole(one.median_tokens_per_s),
            "MFU": _share(one.mfu),
            "Peak memory": _gibibytes(one.peak_memory_bytes),
            "Volatility": _decimals(one.stability.volatility),
        }
        for one in summaries
    ]
    labels = list(columns[0])
    return labels, [[column[label] for column in columns] for label in labels]


def _page(run: Run) -> dict[str, Any]:
    """Return what the page of one run holds."""
    summary = summarise(run)
    final = summary.final_validation
    headline = [
        ("final validation loss", _decimals(final[1]) if final else "not evaluated"),
        ("steps", f"{summary.completed_steps:,}"),
        ("tokens", _count(summary.tokens)),
        ("median tokens/s", _count(summary.median_tokens_per_s)),
    ]
    return {
        "name": run.name,
        "headline": headline,
        "tables": _tables(run, summary),
        "mixture": _mixture(run),
        "charts": list(run_charts(run)),
        "history": run.history,
        "passage": view_passage(run.passage) if run.passage is not None else None,
        "passage_note": run.passage_note,
        "ink": INK,
        "zero_ink": ZERO_INK,
        "mark_alpha": MARK_ALPHA,
        "config": run.config,
        "versions": [
            ("python", platform.python_version()),
            ("system", platform.platform()),
            *((package, installed_version(package) or "not installed") for package in PACKAGES),
        ],
    }


def _tables(run: Run, summary: Summary) -> list[tuple[str, Rows]]:
    """Return the tables of the page, each with its title; rows that would tell nothing are left out."""
    final, steady = summary.final_validation, summary.stability
    perplexity = NONE
    if final is not None:
        perplexity = f"{math.exp(final[1]):,.2f}" if final[1] < 100 else "> 1e43"
    loss = [
        ("Initial validation loss", _at_step(summary.initial_validation)),
        ("Final validation loss", _at_step(final)),
        ("Best validation loss", _at_step(summary.best_validation)),
        ("Final validation perplexity", perplexity),
        ("First training loss", _decimals(summary.initial_train_loss)),
        ("Last training loss", _decimals(summary.final_train_loss)),
    ]
    work = [
        ("Completed steps", f"{summary.completed_steps:,}"),
        ("Tokens consumed", _whole(summary.tokens)),
        ("FLOPs", _count(summary.flops)),
        ("Time in training steps", _duration(summary.seconds)),
        ("of it, waiting for data", _duration(summary.data_wait_seconds)),
        ("Held up by saving", _duration(summary.save_stall_seconds)),
        ("Time saved against the last window", _share(summary.time_saved)),
        ("FLOPs saved against the last window", _share(summary.flops_saved)),
        ("Median MFU", _share(summary.mfu)),
        ("Median throughput", f"{_whole(summary.median_tokens_per_s)} tokens/s"),
        ("Window, start → end", f"{_whole(summary.window_start)} → {_whole(summary.window_end)} tokens"),
        ("Peak memory", _gibibytes(summary.peak_memory_bytes)),
    ]
    if summary.first_step > 0:
        work.append(("First recorded step", f"{summary.first_step:,}"))
    if summary.missing_steps:
        work.append(("Steps without a record", f"{summary.missing_steps:,}"))
    stability = [
        ("Volatility: mean std of loss over 10 steps", _decimals(steady.volatility)),
        ("Smoothness: mean loss change between steps", _decimals(steady.smoothness)),
        ("Mean loss ratio: loss / lowest before it", _decimals(steady.loss_ratio)),
        ("Mean of min(gradient norm, 1)", _decimals(steady.gradient_norm)),
    ]
    if summary.spikes:
        stability.append(("Loss spikes", f"{summary.spikes:,}"))
    if summary.skipped_steps:
        stability.append(("Steps that changed no weight", f"{summary.skipped_steps:,}"))
    if summary.non_finite_steps:
        stability.append(("Non-finite steps, left out above", f"{summary.non_finite_steps:,}"))
    tables = [("Run", _started(run)), ("Loss", loss), ("Work", work), ("Stability", stability)]
    if (weights := summary.weighting) is not None:
        share = weights.zero_share
        weighting = [
            ("Last standard deviation of the weights", _decimals(weights.weight_std)),
            ("Last largest weight", _decimals(weights.weight_max)),
            ("Last share of tokens of weight 0", NONE if share is None else f"{share:.1%}"),
            ("Last mean score", _decimals(weights.score_mean)),
            ("Time in scoring", _duration(weights.seconds)),
        ]
        tables.append(("Token weighting", weighting))
    return tables


def _mixture(run: Run) -> list[tuple[str, tuple[str, ...]]]:
    """Return the name and figures of each data set that a run has drawn from, the largest first; [] of a single one."""
    drawn = drawn_mixture(run)
    if drawn is None:
        return []
    return [
        (
            drawn.names[d],
            (
                NONE if math.isnan(drawn.asked[d]) else f"{drawn.asked[d]:.2%}",
                f"{drawn.shares[-1, d]:.2%}",
                f"{drawn.rows[d]:,}",
            ),
        )
        for d in sorted(range(len(drawn.names)), key=lambda d: -drawn.tokens[d])
    ]


def _started(run: Run) -> Rows:
    """Return what the history knows of the run, and where its last step stands in time."""
    rows = [("Status", run.history.status), ("Starts", f"{len(run.history.starts):,}")]
    if run.history.starts:
        newest = run.history.starts[-1]
        rows += [
            ("First started", str(run.history.starts[0]["time"])),
            ("Host", str(newest["host"])),
            ("Devices", str(newest["devices"])),
            ("Layout", f"{newest['processes']} processes: {newest['layout']}"),
            ("Parameters", _count(newest["parameters"])),
        ]
        if data := newest.get("data"):
            names = ", ".join(f"{part['name']} ({part['packing']})" for part in data[:_MOST_NAMED])
            more = len(data) - _MOST_NAMED
            rows.append(("Data", names + (f" and {more} more" if more > 0 else "")))
    if (moment := run.records[-1].get("time")) is not None:
        written = datetime.datetime.fromtimestamp(moment).astimezone()
        rows.append(("Last recorded step", written.isoformat(timespec="seconds")))
    return rows


def _decimals(value: float | None) -> str:
    return NONE if value is None or math.isnan(value) else f"{value:.4f}"


def _at_step(point: tuple[int, float] | None) -> str:
    """Write a loss and the step that it was measured at."""
    return NONE if point is None else f"{_decimals(point[1])} at step {point[0]:,}"


def _whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _count(value: float | None) -> str:
    return NONE if value is None else short_number(float(f"{value:.3g}"))


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def _gibibytes(value: float | None) -> str:
    return f"{value / 2**30:.2f} GiB" if value else NONE


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"
