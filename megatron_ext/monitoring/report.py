"""Writes a page about a run: `report.png` with its curves, `report.html` with curves, summary and configuration."""

from __future__ import annotations

import base64
import math
import platform
from collections.abc import Sequence
from pathlib import Path

import jinja2

from megatron_ext.files.aside import file_aside
from megatron_ext.inspect.passage import INK, MARK_ALPHA, ZERO_INK, view_passage
from megatron_ext.installed import installed_version
from megatron_ext.monitoring.figures import draw_comparison, draw_run, write_png
from megatron_ext.monitoring.runs import Run, Summary, load_run, load_runs, summarise

PNG_FILE, HTML_FILE = "report.png", "report.html"
TEMPLATE = "report.html.jinja"
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

NONE = "\N{EN DASH}"  # where a run has no such number


def write_report(run_folder: Path | str) -> Path:
    """Write `report.png` and the self-contained `report.html` into the run folder; returns the HTML's path.

    Works on a run that is still training, was resumed or was killed.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt.
    """
    run = load_run(run_folder)
    png = write_png(lambda: draw_run(run), run.folder / PNG_FILE, DPI)
    html = run.folder / HTML_FILE
    with file_aside(html) as aside:
        aside.write_text(render_html(run, png.read_bytes()), encoding="utf-8")
    return html


def write_comparison(run_folders: Sequence[Path | str], output: Path | str) -> Path:
    """Draw the curves of several runs over each other into the PNG `output`; returns its path.

    Raises:
        UserError: a folder given twice, a run without metrics, or `output` is no .png.
    """
    return write_png(lambda: draw_comparison(load_runs(run_folders)), output, DPI)


def render_html(run: Run, png: bytes) -> str:
    """Return the page as text: no script, no link, the figure embedded; name, configuration and passage escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summary = summarise(run)
    final = summary.final_validation
    headline = [
        ("final validation loss", _decimals(final[1]) if final else "not evaluated"),
        ("steps", f"{summary.completed_steps:,}"),
        ("tokens", _count(summary.tokens)),
        ("median tokens/s", _count(summary.median_tokens_per_s)),
    ]
    return environment.get_template(TEMPLATE).render(
        name=run.name,
        headline=headline,
        tables=_tables(summary),
        figure=base64.b64encode(png).decode("ascii"),
        weighted=run.weighted,
        passage=view_passage(run.passage) if run.passage is not None else None,
        passage_note=run.passage_note,
        ink=INK,
        zero_ink=ZERO_INK,
        mark_alpha=MARK_ALPHA,
        config=run.config,
        versions=[
            ("python", platform.python_version()),
            ("system", platform.platform()),
            *((package, installed_version(package) or "not installed") for package in PACKAGES),
        ],
    )


def _tables(summary: Summary) -> list[tuple[str, Rows]]:
    """Return the tables of the page, each with its title; rows that would tell nothing are left out."""
    final, peak, steady = summary.final_validation, summary.peak_memory_bytes, summary.stability
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
    run = [
        ("Completed steps", f"{summary.completed_steps:,}"),
        ("Tokens consumed", _whole(summary.tokens)),
        ("Time in training steps", _duration(summary.seconds)),
        ("Median throughput", f"{_whole(summary.median_tokens_per_s)} tokens/s"),
        ("Window, start → end", f"{_whole(summary.window_start)} → {_whole(summary.window_end)} tokens"),
        ("Peak memory", f"{peak / 2**30:.2f} GiB" if peak else NONE),
    ]
    if summary.first_step > 0:
        run.append(("First recorded step", f"{summary.first_step:,}"))
    if summary.missing_steps:
        run.append(("Steps without a record", f"{summary.missing_steps:,}"))
    stability = [
        ("Volatility: mean std of loss over 10 steps", _decimals(steady.volatility)),
        ("Smoothness: mean loss change between steps", _decimals(steady.smoothness)),
        ("Mean loss ratio: loss / lowest before it", _decimals(steady.loss_ratio)),
        ("Mean of min(gradient norm, 1)", _decimals(steady.gradient_norm)),
    ]
    if summary.non_finite_steps:
        stability.append(("Non-finite steps, left out above", f"{summary.non_finite_steps:,}"))
    tables = [("Loss", loss), ("Run", run), ("Stability", stability)]
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


def _decimals(value: float | None) -> str:
    return NONE if value is None or math.isnan(value) else f"{value:.4f}"


def _at_step(point: tuple[int, float] | None) -> str:
    """Write a loss and the step that it was measured at."""
    return NONE if point is None else f"{_decimals(point[1])} at step {point[0]:,}"


def _whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _count(value: float | None) -> str:
    if value is None:
        return NONE
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"
