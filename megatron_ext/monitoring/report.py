"""Write the report of one run, or a comparison of several: an HTML page with interactive charts, and a PNG.

The page is one file: plotly.js is part of it, nothing is loaded from the network.
"""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
import plotly.graph_objects as go
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from plotly.colors import sample_colorscale
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.monitoring.runs import (
    CLOCKS,
    Column,
    Run,
    load_run,
    load_runs,
    loss_difference,
)

PNG_FILE, HTML_FILE, EVALUATIONS = "report.png", "report.html", "evaluations"
RUN_COLORS = ("#2166ac", "#d95f02", "#1b8a6b", "#7a4fb3", "#c23b54", "#8a6a2f", "#3aa6c9", "#5b5f66")
NONE = "\N{EN DASH}"  # shown for a missing number
PANELS = (  # of the PNG: metric and title
    ("lm_loss", "Training loss"),
    ("valid_loss", "Validation loss"),
    ("window", "Context window"),
    ("effective_context", "Effective context"),
    ("tokens_per_s", "Throughput (tokens / s)"),
    ("grad_norm", "Gradient norm before clipping"),
)
METRICS = (  # metrics of training steps: key, title, unit
    ("window", "Context window", "tokens"),
    ("effective_context", "Effective context", "Σ length² / row (tokens)"),
    ("tokens_per_s", "Throughput", "tokens / s"),
    ("mfu", "Model FLOPs utilisation", "share of the GPUs' peak"),
    ("grad_norm", "Gradient norm before clipping", "L2 norm"),
    ("learning_rate", "Learning rate", ""),
    ("moe_aux_loss", "Load balance of experts", "loss"),
    ("data_wait_s", "Waiting for data", "seconds of a step"),
    ("save_stall_s", "Stall by saving", "seconds before a step"),
    ("weight_std", "Spread of token weights", "standard deviation"),
    ("weight_max", "Largest token weight", "weight"),
    ("zero_share", "Tokens of weight 0", "share of tokens"),
    ("score_mean", "Mean score", "score"),
)
ATTENTION = (  # measured every --attention-health-interval steps: key, title, unit
    ("attention_entropy", "Attention entropy", "nats"),
    ("attention_sink_share", "Attention sinks", "share of heads"),
    ("attention_s_max_scaled", "Largest attention score", "after scaling"),
    ("attention_distance", "Attended distance", "tokens"),
    ("attention_clipped", "Heads clipped", "heads"),
)
_EXACT = ("window", "learning_rate", "valid_loss")  # drawn without a running mean
_LOG = ("window", "effective_context", "grad_norm", "weight_max")  # on a log axis if they span a factor of 8
_CLIP_FROM = 50  # with this many steps, the loss axis covers 97 % of them
_MOST_POINTS = 1000  # points of a trace; longer traces keep the extremes of each span
_THEME = go.layout.Template(  # legible on light and dark pages
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#7f8794"},
        "colorway": RUN_COLORS,
        "xaxis": {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False},
        "yaxis": {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False, "exponentformat": "SI"},
        "margin": {"l": 60, "r": 10, "t": 10, "b": 45},
        "legend": {"orientation": "h", "y": -0.2},
        "hovermode": "x unified",
        "height": 340,
    }
)


@dataclass(frozen=True)
class Chart:
    """A titled plotly figure."""

    title: str
    figure: go.Figure
    caption: str = ""

    @property
    def html(self) -> str:
        """The figure as an HTML fragment that needs plotly.js."""
        config = {"responsive": True, "displayModeBar": False}
        text: str = self.figure.to_html(full_html=False, include_plotlyjs=False, config=config)
        return text


def write_report(run_folder: Path | str, evaluations: Sequence[Path] = ()) -> Path:
    """Write `report.png` and `report.html` to a run folder, also while it trains; return the path of the HTML.

    Args:
        run_folder: the --save of training.
        evaluations: --output folders of tools/evaluate.py, in addition to RUN/evaluations.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt, or a folder contains no evaluation.
    """
    run = load_run(run_folder)
    page = _page([run], evaluations)
    with atomic_write(run.folder / PNG_FILE) as aside:
        draw(run).savefig(aside, dpi=160, format="png")
    return _write(run.folder / HTML_FILE, page)


def write_comparison(run_folders: Sequence[Path | str], output: Path | str, evaluations: Sequence[Path] = ()) -> Path:
    """Overlay several runs in `output`, an HTML page; return its path.

    Raises:
        UserError: a run without metrics, or `output` does not end in .html.
    """
    output = Path(output)
    if output.suffix.lower() != ".html":
        raise UserError(f"output: got {str(output)!r}, needs a file name that ends in .html")
    return _write(output, _page(load_runs(run_folders), evaluations))


def _write(path: Path, page: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as aside:
        aside.write_text(page, encoding="utf-8")
    return path


def draw(run: Run) -> Figure:
    """Draw the running means of the most important metrics."""
    style: dict[Any, Any] = {"text.parse_math": False, "axes.grid": True, "grid.color": "#e5e7eb"}
    with matplotlib.rc_context(style):  # names of runs may contain $
        figure = Figure(figsize=(12.5, 11.0), layout="constrained")
        figure.suptitle(run.name, fontweight="bold")
        for axis, (key, title) in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
            axis.set(title=title, xlabel="optimizer step")
            curve = (run.validation() if key == "valid_loss" else run.curve(key)).finite()
            values = curve.values if key in _EXACT else running_mean(curve.values)
            axis.plot(curve.steps, values, ".-" if values.size <= 40 else "-", color=RUN_COLORS[0])
            if is_log(key, curve.values):
                axis.set_yscale("log")
            if key == "lm_loss":
                axis.set_ylim(loss_range([curve.values]))
        return figure


def _page(runs: Sequence[Run], evaluations: Sequence[Path]) -> str:
    """Return the HTML of one or several runs."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    columns = [table(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    details = []
    for run in runs:
        starts = [f"{start['time']}, after {start['step']:,} steps: {start['command']}" for start in run.history.starts]
        details.append((f"Starts of {run.name}", "\n".join(starts) or "This run folder has no history.jsonl."))
        details.append((f"Configuration of {run.name}", run.config or "This run folder has no config.yaml."))
    return environment.get_template("report.html.jinja").render(
        title=runs[0].name if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        plotly=get_plotlyjs(),
        names=[run.name for run in runs],
        colors=RUN_COLORS,
        rows=[(label, [column.get(label, NONE) for column in columns]) for label in labels],
        notes=list(_notes(runs)),
        charts=list(charts(runs)),
        evaluations=list(_evaluations([run.folder for run in runs], evaluations)),
        passages=[run.passage.html() for run in runs if run.passage is not None],
        details=details,
    )


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs[1:]:
        found = loss_difference(runs[0], run)
        if found is None:
            continue
        mean, spread = found
        yield (
            f"Training loss of {run.name} minus that of {runs[0].name}, over the last tenth of their common steps: "
            f"mean {mean:+.4f} nats, standard deviation over steps {spread:.4f}. One seed each: this describes these "
            "two runs and says nothing about others."
        )


def _evaluations(runs: Sequence[Path], given: Sequence[Path]) -> Iterator[str]:
    """Yield the tables of tools/evaluate.py as HTML; their text is escaped."""
    paths: dict[Path, Path] = {}
    for run in runs:
        paths |= {path.resolve(): path for path in sorted((run / EVALUATIONS).rglob("*.md"))}
    for folder in given:
        found = sorted(folder.rglob("*.md"))
        if not found:
            raise UserError(f"evaluations: got {folder}, which holds no .md; give the --output of tools/evaluate.py")
        paths |= {path.resolve(): path for path in found}
    markdown = MarkdownIt("js-default").disable(["link", "image", "autolink"])
    for path in paths.values():
        yield markdown.render(path.read_text(encoding="utf-8", errors="replace") + f"\n\nFrom `{path}`.\n")


def table(run: Run) -> dict[str, str]:
    """Return the rows of a run's table; rows without a value are left out."""
    last = itemgetter(-1)
    steps = run.curve("step").steps
    losses, norms = run.curve("lm_loss").values, run.curve("grad_norm").values
    finite = np.isfinite(losses) & np.isfinite(norms)
    trained = run.curve("denominator").values != 0
    known = run.validation().finite()
    points = list(zip(known.steps.tolist(), known.values.tolist(), strict=True))
    best, final = (min(points, key=last), points[-1]) if points else (None, None)
    times = run.curve("step_time_s").finite().values
    slowness = np.quantile(times, [0.5, 0.05, 0.95]) if times.size else None
    windows = run.curve("window").finite().values
    rows: dict[str, str | None] = {
        "Status": run.history.status,
        **_started(run),
        "Final validation loss": _text(final, "{0[1]:.4f} at step {0[0]:,.0f}") or "not evaluated",
        "Best validation loss": _text(best, "{0[1]:.4f} at step {0[0]:,.0f}"),
        **{
            f"Final validation loss at {length:,}": _text(curve.values[-1], "{:.4f}")
            for length, curve in run.validation_by_length().items()
        },
        "Last training loss": _text(run.reduced("lm_loss", last), "{:.4f}"),
        "Completed steps": f"{int(steps[-1]) + 1:,}",
        "Tokens": _text(run.reduced("consumed_tokens", last), "{:,.0f}"),
        "FLOPs": _text(run.reduced("flops", np.sum), "{:.3g}"),
        "FLOPs saved against the last window": _text(run.flops_saved(), "{:.1%}"),
        "Time in training steps": _duration(times.sum()),
        "Step time, median (5 % to 95 % of steps)": _text(slowness, "{0[0]:.3g} s ({0[1]:.3g} to {0[2]:.3g} s)"),
        "Waiting for data": _duration(run.reduced("data_wait_s", np.sum)),
        "Stalled by saving": _duration(run.reduced("save_stall_s", np.sum)),
        "Median tokens/s": _text(run.reduced("tokens_per_s", np.median), "{:,.0f}"),
        "Median MFU": _text(run.reduced("mfu", np.median), "{:.1%}"),
        "Window, start → end": _text(
            (windows[0], windows[-1]) if windows.size else None, "{0[0]:,.0f} → {0[1]:,.0f} tokens"
        ),
        "Peak memory": _text((run.reduced("peak_memory_bytes", np.max) or 0) / 2**30 or None, "{:.2f} GiB"),
        "Loss spikes": _text(int(np.nansum(run.curve("spike").values)) or None, "{:,}"),
        "Steps that changed no weight": _text(int(np.nansum(run.curve("skipped").values)) or None, "{:,}"),
        "Non-finite steps": _text(int(np.count_nonzero(~finite & trained)) or None, "{:,}"),
        "Time in scoring": _duration(run.reduced("score_time_s", np.sum)),
    }
    return {label: text for label, text in rows.items() if text is not None}


def _text(value: Any, pattern: str) -> str | None:
    """Format a value; None and NaN stay None."""
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else pattern.format(value)


def _duration(seconds: float | None) -> str | None:
    if not seconds:
        return None
    return f"{seconds:.1f} s" if seconds < 60 else tqdm.format_interval(seconds)


def _started(run: Run) -> dict[str, str | None]:
    """Return the run's start according to its history, and when its last step was recorded."""
    rows: dict[str, str | None] = {"Starts": _text(len(run.history.starts) or None, "{:,}")}
    if run.history.starts:
        newest = run.history.starts[-1]
        rows |= {
            "First started": str(run.history.starts[0]["time"]),
            "Host": str(newest["host"]),
            "Devices": str(newest["devices"]),
            "Layout": f"{newest['processes']} processes: {newest['layout']}",
            "Parameters": tqdm.format_sizeof(newest["parameters"]).replace("G", "B"),
            "Data": ", ".join(f"{part['name']} ({part['packing']})" for part in newest.get("data") or ()) or None,
        }
    if (moment := run.records[-1].get("time")) is not None:
        rows["Last recorded step"] = datetime.datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")
    return rows


# Charts


def charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield the charts of one or several runs, one color for each run; empty charts are omitted."""
    alone = len(runs) == 1
    yield _losses(runs)
    yield from _validations(runs)
    for key, title, unit in METRICS:
        traces, drawn = [], [np.empty(0)]
        for number, run in enumerate(runs):
            curve = run.curve(key).finite()
            if not curve.values.any():
                continue
            kept = _kept(curve.values)
            if alone and key not in _EXACT:
                traces.append(_trace(curve.steps[kept], curve.values[kept], "each step", number, opacity=0.35))
            values = curve.values if key in _EXACT else running_mean(curve.values)
            traces.append(_trace(curve.steps[kept], values[kept], run.name, number))
            drawn.append(curve.values)
        if traces:
            yield Chart(title, _figure(traces, unit, log=is_log(key, np.concatenate(drawn))))
    for key, title, unit in ATTENTION:
        traces = []
        for number, run in enumerate(runs):
            steps, values = run.by_layer(key)
            if not steps.size:
                continue
            for layer, (column, shade) in enumerate(zip(values.T, _shades(values.shape[1]), strict=True)):
                if alone:
                    thin = {"color": shade, "width": 1}
                    traces.append(_trace(steps, column, f"layer {layer + 1}", number, line=thin, showlegend=False))
            traces.append(_trace(steps, values.mean(axis=1), f"{run.name}, mean of layers", number))
        if traces:
            yield Chart(title, _figure(traces, unit))
    for run in runs:
        if (mixture := run.mixture()) is not None:
            traces = []
            for number, (name, share) in enumerate(zip(mixture.names, mixture.requested, strict=True)):
                traces.append(_trace(mixture.steps, mixture.shares[:, number], name, number))
                dashed = {"color": RUN_COLORS[number % len(RUN_COLORS)], "dash": "dash", "width": 1}
                ends = mixture.steps[[0, -1]]
                traces.append(_trace(ends, [share] * 2, f"{name}, requested", number, line=dashed, showlegend=False))
            caption = "Share of all tokens drawn up to a step; dashed: as requested."
            yield Chart(f"Mixture as drawn by {run.name}", _figure(traces, "share of tokens"), caption)


def _losses(runs: Sequence[Run]) -> Chart:
    """Return the training loss of each run, with buttons for the x axis: steps, tokens, FLOPs or hours."""
    alone = len(runs) == 1
    axes: dict[str, list[Column]] = {"steps": []}
    axes |= {clock: [] for clock in CLOCKS if all(run.clock(clock) is not None for run in runs)}
    traces = []
    for number, run in enumerate(runs):
        losses, weighted = run.curve("lm_loss"), run.curve("train_loss").values
        clocks = {name: losses.steps if name == "steps" else run.clock(name) for name in axes}
        shown = [(running_mean, losses.values, run.name, 1.0)]
        if alone:
            shown.insert(0, (lambda values: values, losses.values, "each step", 0.35))
            if not np.allclose(weighted, losses.values, rtol=1e-4, atol=0, equal_nan=True):
                shown.append((running_mean, weighted, f"{run.name}, weighted", 0.6))
        for smooth, values, name, opacity in shown:
            known = np.isfinite(values)
            if not known.any():
                continue
            kept = _kept(values[known])
            traces.append(_trace(losses.steps[known][kept], smooth(values[known])[kept], name, number, opacity=opacity))
            for axis, columns in axes.items():
                clock = clocks[axis]
                assert clock is not None
                columns.append(clock[known][kept])
    figure = _figure(traces, "nats / token")
    figure.update_yaxes(range=loss_range([run.curve("lm_loss").finite().values for run in runs]))
    buttons = [
        {"label": axis.replace("consumed_", ""), "method": "update", "args": [{"x": columns}, {"xaxis.title.text": ""}]}
        for axis, columns in axes.items()
    ]
    menu = {"type": "buttons", "direction": "right", "x": 1, "y": 1.14, "showactive": False, "buttons": buttons}
    figure.update_layout(updatemenus=[menu], margin={"t": 40})
    return Chart("Training loss", figure, "Running means; double-click shows the first steps too.")


def _validations(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield the validation loss by step, for each evaluation length, and by position."""
    alone, traces = len(runs) == 1, []
    for number, run in enumerate(runs):
        by_length = run.validation_by_length() or {0: run.validation()}
        for place, ((length, curve), shade) in enumerate(zip(by_length.items(), _shades(len(by_length)), strict=True)):
            known = curve.finite()
            if known.values.size:
                name = f"{run.name}, {length:,} tokens" if length else run.name
                style = {"line": {"color": shade}} if alone else {"opacity": (place + 1) / len(by_length)}
                traces.append(_trace(known.steps, known.values, name, number, mode="lines+markers", **style))
    if traces:
        yield Chart("Validation loss", _figure(traces, "nats / token"))
    traces = []
    for number, run in enumerate(runs):
        found = sorted(run.losses_by_position().items())
        drawn = [found[0], found[len(found) // 2], found[-1]] if alone and len(found) > 2 else found[-1:]
        for place, (step, losses) in enumerate(drawn):
            positions = sorted(losses)
            name = f"{run.name}, after {step:,} steps"
            means = [losses[position] for position in positions]
            traces.append(_trace(positions, means, name, number + place, mode="lines+markers"))
    if traces:
        figure = _figure(traces, "nats / token", x="tokens that a token sees, itself included")
        figure.update_xaxes(type="log", dtick=math.log10(4))
        yield Chart("Validation loss by position", figure)


def _trace(x: Any, y: Any, name: str, number: int, **style: Any) -> go.Scatter:
    """Return a line in the color of its number."""
    return go.Scatter(
        x=x, y=y, name=html.escape(name), **{"line": {"color": RUN_COLORS[number % len(RUN_COLORS)]}, **style}
    )


def _shades(count: int) -> list[str]:
    shades: list[str] = sample_colorscale("Viridis", np.linspace(0.2, 0.85, max(count, 2)).tolist())
    return shades[:count]


def _figure(traces: Sequence[go.Scatter], unit: str, *, x: str = "optimizer step", log: bool = False) -> go.Figure:
    figure = go.Figure(traces, {"template": _THEME, "showlegend": len(traces) > 1})
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=unit + (", log scale" if log else ""))
    if log:
        figure.update_yaxes(type="log", dtick="D2")
    return figure


def is_log(key: str, values: Column) -> bool:
    """Return whether the values of a metric are drawn on a logarithmic axis."""
    return key in _LOG and values.size > 0 and bool(0 < 8 * values.min() <= values.max())


def loss_range(curves: Sequence[Column]) -> tuple[float, float] | None:
    """Return a range that covers 97 % of each curve, excluding the high first steps; None for the full range."""
    known = [values for values in curves if values.size]
    if not known or min(values.size for values in known) < _CLIP_FROM:
        return None
    low, high = min(values.min() for values in known), max(np.quantile(values, 0.97) for values in known)
    margin = 0.06 * (high - low)
    return (float(low - margin), float(high + margin)) if margin else None


def running_mean(values: Column) -> Column:
    """Return the centered running mean [n] over about a fiftieth of the curve; spans are shorter at both ends."""
    n = values.size
    index = np.arange(n)
    before = np.minimum(index, n // 100 + 1)
    after = np.minimum(before, n - 1 - index)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + after + 1] - sums[index - before]) / (before + after + 1)


def _kept(values: Column) -> np.ndarray:
    """Return the indices of the points to draw: for a long curve, the lowest and highest of each span."""
    if values.size <= _MOST_POINTS:
        return np.arange(values.size)
    spans = np.array_split(np.arange(values.size), _MOST_POINTS // 2)
    return np.concatenate([sorted({span[values[span].argmin()], span[values[span].argmax()]}) for span in spans])
