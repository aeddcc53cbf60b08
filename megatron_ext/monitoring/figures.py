"""Draw PNGs with matplotlib: the curves of one or several runs, as one figure of 3 x 2 panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.monitoring.runs import Column, Run

BLUE, ORANGE, GREEN, PURPLE, RED = "#2166ac", "#d95f02", "#1b8a6b", "#7a4fb3", "#c23b54"
RUN_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, "#8a6a2f", "#3aa6c9", "#5b5f66")
GREY = "#6b7280"

STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "text.parse_math": False,  # names of runs may contain $
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}
PANELS = (  # panels of a figure of runs: metric, title, unit
    ("lm_loss", "Training loss", "nats / token"),
    ("valid_loss", "Validation loss", "nats / token"),
    ("window", "Context window", "tokens"),
    ("effective_context", "Effective context", "tokens"),
    ("tokens_per_s", "Throughput", "tokens / s"),
    ("grad_norm", "Gradient norm before clipping", "L2 norm"),
)
LOG_METRICS = ("window", "effective_context", "grad_norm", "weight_max")  # on a log axis if they span a factor of 8
_CLIP_FROM = 50  # with this many steps, the loss axis covers 97 % of them


def write_png(draw: Callable[[], Figure], output: Path | str, dpi: int) -> Path:
    """Draw a figure into a PNG, written atomically, and return its path.

    Raises:
        UserError: `output` does not end in .png.
    """
    output = Path(output)
    if output.suffix.lower() != ".png":
        raise UserError(f"output: got {str(output)!r}, needs a file name that ends in .png; give one")
    figure = draw()
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as aside:
        figure.savefig(aside, dpi=dpi, format="png", metadata={"Software": None})
    return output


def draw_runs(runs: Sequence[Run]) -> Figure:
    """Draw the running means of the most important metrics, one color for each run."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 11.0), layout="constrained")
        figure.suptitle(title_of(runs), fontsize=14, fontweight="bold", x=0.012, ha="left")
        for axis, (key, title, unit) in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
            axis.set(title=title, xlabel="optimizer step", ylabel=unit)
            curves = [(run.validation() if key == "valid_loss" else run.curve(key)).finite() for run in runs]
            for number, (run, curve) in enumerate(zip(runs, curves, strict=True)):
                colour = RUN_COLOURS[number % len(RUN_COLOURS)]
                if len(runs) == 1 and key not in ("valid_loss", "window"):
                    axis.plot(curve.steps, curve.values, color=colour, alpha=0.3, linewidth=0.8)
                smooth = curve.values if key in ("valid_loss", "window") else running_mean(curve.values)
                mark = "o-" if curve.values.size <= 40 else "-"
                axis.plot(curve.steps, smooth, mark, markersize=3.5, color=colour, label=run.name)
            values = np.concatenate([curve.values for curve in curves])
            if is_log(key, values):
                axis.set_yscale("log")
            if key == "lm_loss":
                axis.set_ylim(loss_range([curve.values for curve in curves]))
                if len(runs) > 1:
                    axis.legend()
        return figure


def title_of(runs: Sequence[Run]) -> str:
    """Return the title of a figure or a page."""
    return runs[0].name if len(runs) == 1 else f"Comparison of {len(runs)} runs"


def is_log(key: str, values: Column) -> bool:
    """Return whether the values of a metric are drawn on a logarithmic axis."""
    return key in LOG_METRICS and values.size > 0 and bool(0 < 8 * values.min() <= values.max())


def loss_range(curves: Sequence[Column]) -> tuple[float, float] | None:
    """Return a range that covers 97 % of each curve, excluding the high first steps; None for the full range."""
    known = [values for values in curves if values.size]
    if not known or min(values.size for values in known) < _CLIP_FROM:
        return None
    low, high = min(values.min() for values in known), max(np.quantile(values, 0.97) for values in known)
    margin = 0.06 * (high - low)
    return (float(low - margin), float(high + margin)) if margin else None


def running_mean(values: Column) -> Column:
    """Return the centred running mean [n] over about a fiftieth of the curve; spans are shorter at both ends."""
    n = values.size
    index = np.arange(n)
    before = np.minimum(index, n // 100 + 1)
    after = np.minimum(before, n - 1 - index)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + after + 1] - sums[index - before]) / (before + after + 1)
