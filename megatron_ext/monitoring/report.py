"""Write a report on one run or several: an HTML page with interactive charts, and a PNG beside it.

The page is one file: plotly.js is part of it, nothing is loaded from the network.
"""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import plotly.graph_objects as go
from matplotlib.figure import Figure
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.monitoring.runs import Column, Curve, Run, loss_difference, parts

RUN_COLORS = ("#2166ac", "#d95f02", "#1b8a6b", "#7a4fb3", "#c23b54", "#8a6a2f", "#3aa6c9", "#5b5f66")
PICTURE = ("lm_loss", "window", "tokens_per_s", "effective_context")  # panels of the PNG
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
LOG_AXES = ("window", "effective_context", "grad_norm", "weight_max")
ATTENTION = (  # measured every --attention-health-interval steps: key, title, unit
    ("attention_entropy", "Attention entropy", "nats"),
    ("attention_sink_share", "Attention sinks", "share of heads"),
    ("attention_s_max_scaled", "Largest attention score", "after scaling"),
    ("attention_distance", "Attended distance", "tokens"),
    ("attention_clipped", "Heads clipped", "heads"),
)
CLOCKS = {"tokens": "consumed_tokens", "FLOPs": "flops", "hours": "step_time_s"}  # axes of the loss beside steps
MOST_POINTS = 200  # of a trace; longer curves are averaged
_THEME = go.layout.Template(  # legible on light and dark pages
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#7f8794"},
        "xaxis": {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False},
        "yaxis": {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False, "exponentformat": "SI"},
        "margin": {"l": 60, "r": 10, "t": 10, "b": 45},
        "legend": {"orientation": "h", "y": -0.2},
        "hovermode": "x unified",
        "height": 340,
    }
)


def write_report(runs: Sequence[Run], output: Path, evaluations: Sequence[Path] = ()) -> Path:
    """Write a page on the runs and a PNG, `output` with the suffixes .html and .png; return the path of the page.

    Args:
        runs: of any state, also of a run that trains.
        output: its folder is created if missing.
        evaluations: --output folders of tools/evaluate.py, in addition to RUN/evaluations.

    Raises:
        UserError: a folder contains no evaluation.
    """
    page, text = output.with_suffix(".html"), _page(runs, evaluations)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output.with_suffix(".png")) as aside:
        draw(runs).savefig(aside, dpi=160, format="png")
    with atomic_write(page) as aside:
        aside.write_text(text, encoding="utf-8")
    return page


def draw(runs: Sequence[Run]) -> Figure:
    """Draw the most important metrics."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    for axis, key in zip(figure.subplots(2, 2).flat, PICTURE, strict=True):
        for number, run in enumerate(runs):
            axis.plot(*run.curve(key), color=_color(number))
        axis.set(title=key, xlabel="optimizer step")
        axis.grid(color="#e5e7eb")
    return figure


def _page(runs: Sequence[Run], evaluations: Sequence[Path]) -> str:
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
    config = {"responsive": True, "displayModeBar": False}
    figures = {
        title: figure.to_html(full_html=False, include_plotlyjs=False, config=config)
        for title, figure in charts(runs).items()
    }
    return environment.get_template("report.html.jinja").render(
        title=runs[0].name if len(runs) == 1 else f"Comparison of {len(runs)} runs",
        plotly=get_plotlyjs(),
        names=[run.name for run in runs],
        colors=RUN_COLORS,
        rows=[(label, [column.get(label, "\N{EN DASH}") for column in columns]) for label in labels],
        notes=list(_notes(runs)),
        charts=figures,
        evaluations=list(_evaluations(runs, evaluations)),
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


def _evaluations(runs: Sequence[Run], given: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the tables of tools/evaluate.py."""
    for folder in [*(run.folder / "evaluations" for run in runs), *given]:
        found = sorted(folder.rglob("*.md"))
        if folder in given and not found:
            raise UserError(f"evaluations: got {folder}, which holds no .md; give the --output of tools/evaluate.py")
        for path in found:
            yield str(path), path.read_text(encoding="utf-8", errors="replace")


def _flops_saved(flops: Column) -> float:
    """Return the share of FLOPs saved against all steps being like the last tenth."""
    return float(1 - flops.mean() / flops[-max(len(flops) // 10, 1) :].mean())


def _local_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


_SUMMARY: tuple[tuple[str, str, Callable[[Column], float], Callable[[float], str]], ...] = (
    ("Last recorded step", "time", itemgetter(-1), _local_time),
    ("Last training loss", "lm_loss", itemgetter(-1), "{:.4f}".format),
    ("Tokens", "consumed_tokens", itemgetter(-1), "{:,.0f}".format),
    ("FLOPs", "flops", np.sum, "{:.3g}".format),
    ("FLOPs saved against the last steps", "flops", _flops_saved, "{:.1%}".format),
    ("Time in training steps", "step_time_s", np.sum, tqdm.format_interval),
    ("Waiting for data", "data_wait_s", np.sum, tqdm.format_interval),
    ("Stalled by saving", "save_stall_s", np.sum, tqdm.format_interval),
    ("Time in scoring", "score_time_s", np.sum, tqdm.format_interval),
    ("Median step time", "step_time_s", np.median, "{:.3g} s".format),
    ("Median tokens/s", "tokens_per_s", np.median, "{:,.0f}".format),
    ("Median MFU", "mfu", np.median, "{:.1%}".format),
    ("Peak memory", "peak_memory_bytes", np.max, lambda size: tqdm.format_sizeof(size, "iB", 1024)),
    ("Loss spikes", "spike", np.sum, "{:,.0f}".format),
    ("Steps that changed no weight", "skipped", np.sum, "{:,.0f}".format),
)


def table(run: Run) -> dict[str, str]:
    """Return the rows of a run's table: how it was started and ended, losses, and sums over its steps."""
    rows = {"Status": run.history.status}
    if run.history.starts:
        newest = run.history.starts[-1]
        rows |= {
            "Started": str(newest["time"]),
            "Host": str(newest["host"]),
            "Devices": str(newest["devices"]),
            "Layout": f"{newest['processes']} processes: {newest['layout']}",
            "Parameters": f"{newest['parameters']:,}",
        }
    rows["Completed steps"] = f"{run.steps:,}"
    for length, (steps, values) in _by_length(run).items():
        last = f"{values[-1]:.4f} after {steps[-1]:,.0f} steps"
        rows[f"Validation loss at {length:,} tokens"] = f"{last}, lowest {values.min():.4f}"
    for label, key, reduce, show in _SUMMARY:
        if (values := run.curve(key).values).size:
            rows[label] = show(reduce(values))
    trained, losses, norms = (run.curve(key) for key in ("denominator", "lm_loss", "grad_norm"))
    finite = np.intersect1d(losses.steps, norms.steps)
    rows["Non-finite steps"] = f"{np.setdiff1d(trained.steps[trained.values != 0], finite).size:,}"
    return rows


def _by_length(run: Run) -> dict[int, Curve]:
    """Return the validation loss at each evaluation length in tokens, shortest first."""
    by_length = {int(length): curve for length, curve in parts(run.validation, "by_length").items()}
    return dict(sorted(by_length.items()))


# Charts


def charts(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """Return the charts of one or several runs by title, one color for each run; empty charts are omitted."""
    found = {"Training loss": _losses(runs), **_validations(runs)}
    for key, title, unit in METRICS:
        traces = []
        for number, run in enumerate(runs):
            if run.curve(key).values.any():
                traces += _steps(run.curve(key), run.name, number, extremes=len(runs) == 1)
        found[title] = _figure(traces, unit, log=key in LOG_AXES)
    for key, title, unit in ATTENTION:
        traces = []
        for number, run in enumerate(runs):
            layers = parts(run.train, key)
            if len(runs) == 1:
                for layer, (name, curve) in enumerate(layers.items(), start=1):
                    thin = {"opacity": layer / len(layers), "line_width": 1, "showlegend": False}
                    traces.append(_trace(*curve, name, number, **thin))
            if layers:
                steps = next(iter(layers.values())).steps
                means = np.mean([curve.values for curve in layers.values()], axis=0)
                traces.append(_trace(steps, means, f"{run.name}, mean of layers", number))
        found[title] = _figure(traces, unit)
    for run in runs:
        found[f"Mixture as drawn by {run.name}"] = _figure(list(_mixture(run)), "share of tokens drawn so far")
    return {title: figure for title, figure in found.items() if figure.data}


def _losses(runs: Sequence[Run]) -> go.Figure:
    """Draw the training loss of each run, with buttons for the x axis: steps, tokens, FLOPs or hours."""
    traces: list[go.Scatter] = []
    owners: list[Run] = []
    for number, run in enumerate(runs):
        own = _steps(run.curve("lm_loss"), run.name, number, extremes=len(runs) == 1)
        if len(runs) == 1 and "weight_std" in run.train:
            own += _steps(run.curve("train_loss"), f"{run.name}, weighted", number + 1)
        traces += own
        owners += [run] * len(own)
    figure = _figure(traces, "nats / token")
    losses = np.concatenate([run.curve("lm_loss").values for run in runs])
    if losses.size > 50:  # the high first steps would flatten the curve; double-click shows them
        low, high = np.quantile(losses, [0, 0.97])
        margin = (high - low) / 20
        figure.update_yaxes(range=[low - margin, high + margin])
    axes = {"steps": [trace.x for trace in figure.data]}
    for axis, key in CLOCKS.items():
        if all(key in run.train for run in runs):
            axes[axis] = [np.interp(trace.x, *_clock(run, axis)) for trace, run in zip(traces, owners, strict=True)]
    buttons = [
        {"label": axis, "method": "update", "args": [{"x": columns}, {"xaxis.title.text": ""}]}
        for axis, columns in axes.items()
    ]
    menu = {"type": "buttons", "direction": "right", "x": 1, "y": 1.14, "showactive": False, "buttons": buttons}
    figure.update_layout(updatemenus=[menu], margin={"t": 40})
    return figure


def _clock(run: Run, axis: str) -> Curve:
    """Return the tokens, FLOPs or hours (in steps) up to the end of each step."""
    steps, values = run.curve(CLOCKS[axis])
    if axis == "tokens":
        return Curve(steps, values)
    return Curve(steps, np.cumsum(values) / (3600 if axis == "hours" else 1))


def _validations(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """Draw the validation loss by step, for each evaluation length, and by position."""
    by_step, by_position = [], []
    for number, run in enumerate(runs):
        lengths = _by_length(run)
        for place, (length, curve) in enumerate(lengths.items(), start=1):
            style = {"mode": "lines+markers", "opacity": place / len(lengths)}
            by_step.append(_trace(*curve, f"{run.name}, {length:,} tokens", number, **style))
        positions = sorted((int(n), curve) for n, curve in parts(run.validation, "by_position").items())
        if positions:
            steps = np.unique(np.concatenate([curve.steps for _, curve in positions]))
            for place, step in enumerate(steps[[0, -1]] if len(runs) == 1 else steps[-1:]):
                at = {n: mean for n, curve in positions for one, mean in zip(*curve, strict=True) if one == step}
                name = f"{run.name}, after {step:,.0f} steps"
                by_position.append(_trace(list(at), list(at.values()), name, number + place, mode="lines+markers"))
    figure = _figure(by_position, "nats / token", x="tokens that a token sees, itself included")
    figure.update_xaxes(type="log", dtick=math.log10(4))
    return {"Validation loss": _figure(by_step, "nats / token"), "Validation loss by position": figure}


def _mixture(run: Run) -> Iterator[go.Scatter]:
    """Draw the share of each dataset in all tokens drawn up to a step, and dashed as requested.

    A row counts as the average tokens of its dataset.
    """
    sources = {name: source for start in run.history.starts for name, source in start.get("sources", {}).items()}
    drawn = parts(run.train, "source_rows")
    if not drawn:
        return
    steps = np.unique(np.concatenate([curve.steps for curve in drawn.values()]))
    tokens = {
        name: np.interp(steps, curve.steps, np.cumsum(curve.values) * sources[name]["row_tokens"], left=0)
        for name, curve in drawn.items()
    }
    total = np.sum(list(tokens.values()), axis=0)
    for number, (name, own) in enumerate(tokens.items()):
        yield _trace(steps, own / total, name, number)
        requested, style = [sources[name]["share"]] * 2, {"line_dash": "dash", "line_width": 1, "showlegend": False}
        yield _trace(steps[[0, -1]], requested, f"{name}, requested", number, **style)


def _steps(curve: Curve, name: str, number: int, *, extremes: bool = False) -> list[go.Scatter]:
    """Draw a metric of training steps: means over at most `MOST_POINTS` spans of steps, and perhaps their extremes."""
    size = curve.steps.size
    starts = np.linspace(0, size, min(size, MOST_POINTS), endpoint=False, dtype=np.int64)
    steps, values = curve.steps[starts], curve.values
    means = np.add.reduceat(values, starts) / np.diff(starts, append=size)
    traces = [_trace(steps, means, name, number)]
    if extremes and size > MOST_POINTS:
        both = np.stack([np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)], axis=1)
        traces.insert(0, _trace(np.repeat(steps, 2), both.ravel(), "lowest and highest", number, opacity=0.35))
    return traces


def _trace(x: Any, y: Any, name: str, number: int, **style: Any) -> go.Scatter:
    return go.Scatter(x=x, y=y, name=html.escape(name), line_color=_color(number), **style)


def _color(number: int) -> str:
    return RUN_COLORS[number % len(RUN_COLORS)]


def _figure(traces: Sequence[go.Scatter], unit: str, *, x: str = "optimizer step", log: bool = False) -> go.Figure:
    figure = go.Figure(traces, {"template": _THEME, "showlegend": len(traces) > 1})
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=unit + (", log scale" if log else ""))
    if log:
        figure.update_yaxes(type="log", dtick="D2")
    return figure
