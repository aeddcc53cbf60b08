"""Draws the curves of a run, or of several runs on top of each other, as one matplotlib figure of 3 x 2 panels.

With token weighting a row of four smaller panels follows: the history of weights and scores. matplotlib's object
interface draws with Agg, display or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

from megatron_ext.errors import UserError
from megatron_ext.files.aside import file_aside
from megatron_ext.monitoring.panels import (
    WEIGHTING_PANELS,
    comparison_panel,
    curve_panel,
    effective_context_panel,
    finish_small,
    last_panel,
    loss_panel,
    window_panel,
)
from megatron_ext.monitoring.runs import WEIGHTING, Run
from megatron_ext.pages.colours import BROWN, RED, STYLE


def write_png(draw: Callable[[], Figure], output: Path | str, dpi: int) -> Path:
    """Draw a figure into the PNG `output`, written aside and renamed; returns its path.

    Raises:
        UserError: `output` is no .png; nothing is drawn then.
    """
    output = Path(output)
    if output.suffix.lower() != ".png":
        raise UserError(f"output: got {str(output)!r}, needs a file name that ends in .png; give one")
    figure = draw()
    output.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(output) as aside:
        figure.savefig(aside, dpi=dpi, format="png", metadata={"Software": None})
    return output


def draw_run(run: Run) -> Figure:
    """Draw the figure of one run."""
    with matplotlib.rc_context(STYLE):
        figure, axes, small = _panels(run.name, run.weighted)
        loss_panel(axes[0], run)
        window_panel(axes[1], run)
        curve_panel(axes[2], run.curve("tokens_per_s"), BROWN, "Throughput", "tokens / s", from_zero=True)
        effective_context_panel(axes[3], run)
        curve_panel(axes[4], run.curve("grad_norm"), RED, "Gradient norm before clipping", "L2 norm", log=True)
        last_panel(axes[5], run)
        for axis, key, (title, unit, colour) in zip(small, WEIGHTING, WEIGHTING_PANELS, strict=False):
            curve_panel(axis, run.curve(key), colour, title, unit, log=key == "weight_max")
            finish_small(axis, key)
        _share_steps(axes + small, [run])
        return figure


def draw_comparison(runs: Sequence[Run]) -> Figure:
    """Draw the figure of several runs, one colour each; running means only, so that curves can be told apart."""
    panels = [
        ("lm_loss", "Training loss", "nats / token"),
        ("valid_loss", "Validation loss", "nats / token"),
        ("window", "Context window", "tokens"),
        ("effective_context", "Effective context", "tokens"),
        ("tokens_per_s", "Throughput", "tokens / s"),
        ("grad_norm", "Gradient norm before clipping", "L2 norm"),
    ]
    with matplotlib.rc_context(STYLE):
        figure, axes, small = _panels(f"Comparison of {len(runs)} runs", any(run.weighted for run in runs))
        for axis, (key, title, unit) in zip(axes, panels, strict=True):
            comparison_panel(axis, runs, key, title, unit)
        axes[0].legend(loc="upper right")
        for axis, key, (title, unit, _) in zip(small, WEIGHTING, WEIGHTING_PANELS, strict=False):
            comparison_panel(axis, runs, key, title, unit)
            finish_small(axis, key)
        _share_steps(axes + small, runs)
        return figure


def _panels(title: str, weighted: bool) -> tuple[Figure, list[Axes], list[Axes]]:
    """Make the figure, its six panels, and below them the four smaller ones where tokens are weighted."""
    figure = Figure(figsize=(12.5, 13.7 if weighted else 11.0), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold", x=0.012, ha="left", parse_math=False)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)  # type: ignore[union-attr, call-arg]
    ratios = [1.0, 1.0, 1.0, 0.72] if weighted else [1.0, 1.0, 1.0]
    grid = GridSpec(len(ratios), 4, figure=figure, height_ratios=ratios)
    axes = [figure.add_subplot(grid[row, half]) for row in range(3) for half in (slice(0, 2), slice(2, 4))]
    return figure, axes, [figure.add_subplot(grid[3, column]) for column in range(4)] if weighted else []


def _share_steps(axes: Sequence[Axes], runs: Sequence[Run]) -> None:
    """Give all panels the same range of steps, so that they can be read down the page."""
    first = min(run.records[0]["step"] for run in runs)
    ends = [run.records[-1]["step"] + 1 for run in runs]
    last = max(ends + [run.evaluations[-1]["step"] for run in runs if run.evaluations])
    margin = 0.02 * (last - first)
    for axis in axes:
        axis.set_xlim(first - margin, last + margin)
