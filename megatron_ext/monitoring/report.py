"""Write the report of one run, or a comparison of several: an HTML page with interactive charts, and a PNG.

The page is one file: plotly.js is part of it, nothing is loaded from the network.
"""

from __future__ import annotations

import datetime
import html
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import jinja2
import numpy as np
import plotly.graph_objects as go
from markdown_it import MarkdownIt
from plotly.colors import sample_colorscale
from plotly.offline import get_plotlyjs

from megatron_ext.errors import UserError, installed_version
from megatron_ext.files.atomic import atomic_write
from megatron_ext.inspect.passage import passage_html
from megatron_ext.monitoring.figures import (
    RUN_COLOURS,
    draw_runs,
    is_log,
    loss_range,
    running_mean,
    title_of,
    write_png,
)
from megatron_ext.monitoring.runs import (
    CLOCKS,
    Column,
    Run,
    load_run,
    load_runs,
    paired_differences,
    unlike_evaluations,
)
from megatron_ext.monitoring.stability import stability

PNG_FILE, HTML_FILE, EVALUATIONS = "report.png", "report.html", "evaluations"
DPI = 160
PACKAGES = ("megatron_ext", "megatron-core", "torch", "transformer-engine", "flash-attn", "numpy", "plotly")
NONE = "\N{EN DASH}"  # shown for a missing number
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
_EXACT = ("window", "learning_rate")  # drawn without a running mean
_MOST_POINTS = 1000  # points of a trace; longer traces keep the extremes of each span
_THEME = go.layout.Template(  # legible on light and dark pages
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#7f8794"},
        "colorway": RUN_COLOURS,
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
    """Write `report.png` and `report.html` to the run folder; return the path of the HTML.

    Works on a run that is still training, was resumed or was killed.

    Args:
        run_folder: the --save of training.
        evaluations: --output folders of tools/evaluate.py, in addition to RUN/evaluations.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt, or a folder contains no evaluation.
    """
    run = load_run(run_folder)
    page = _page([run], evaluations)
    write_png(lambda: draw_runs([run]), run.folder / PNG_FILE, DPI)
    return _write(run.folder / HTML_FILE, page)


def write_comparison(run_folders: Sequence[Path | str], output: Path | str, evaluations: Sequence[Path] = ()) -> Path:
    """Overlay several runs in `output`, an .html page with tables or a .png; return its path.

    Args:
        run_folders: the --save of each training.
        output: the file to write.
        evaluations: as in `write_report`.

    Raises:
        UserError: a folder given twice, a run without metrics, or `output` is neither .html nor .png.
    """
    output = Path(output)
    if output.suffix.lower() not in (".png", ".html"):
        raise UserError(f"output: got {str(output)!r}, needs a file name that ends in .html or .png; give one")
    runs = load_runs(run_folders)
    if output.suffix.lower() == ".png":
        return write_png(lambda: draw_runs(runs), output, DPI)
    return _write(output, _page(runs, evaluations))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")
    return path


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
    versions = [(package, installed_version(package) or "not installed") for package in PACKAGES]
    versions = [("python", platform.python_version()), ("system", platform.platform()), *versions]
    details.append(("Versions on the machine that wrote this page", "\n".join(map(" ".join, versions))))
    return environment.get_template("report.html.jinja").render(
        title=title_of(runs),
        plotly=get_plotlyjs(),
        names=[run.name for run in runs],
        colours=RUN_COLOURS,
        rows=[(label, [column.get(label, NONE) for column in columns]) for label in labels],
        notes=list(_notes(runs)),
        charts=list(charts(runs)),
        evaluations=list(_evaluations([run.folder for run in runs], evaluations)),
        passages=[passage_html(run.passage) for run in runs if run.passage is not None],
        details=details,
    )


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs[1:]:
        found = paired_differences(runs[0], run)
        if found is None:
            yield f"{run.name} and {runs[0].name} have fewer than 20 steps in common."
            continue
        mean, spread = found.last_tenth
        yield (
            f"Training loss of {run.name} minus that of {runs[0].name}, over the last tenth of their common steps: "
            f"mean {mean:+.4f} nats, standard deviation over steps {spread:.4f}. One seed each: this describes these "
            "two runs and says nothing about others."
        )
    unlike = unlike_evaluations(runs) if len(runs) > 1 else None
    if unlike is not None:
        yield unlike
    for run in runs:
        if run.passage_note:
            yield f"The passage of {run.name} is left out: {run.passage_note}"


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
    first, last = itemgetter(0), itemgetter(-1)
    steps = run.curve("step").steps
    losses, norms = run.curve("lm_loss").values, run.curve("grad_norm").values
    finite = np.isfinite(losses) & np.isfinite(norms)
    trained = run.curve("denominator").values != 0
    known = run.validation().finite()
    points = list(zip(known.steps.astype(int).tolist(), known.values.tolist(), strict=True))
    final = points[-1] if points else None
    steady = stability(losses[finite], norms[finite])
    times = run.curve("step_time_s").finite().values
    at_lengths = {f"Final validation loss at {n:,}": at.finite() for n, at in run.validation_by_length().items()}
    rows: dict[str, str | None] = {
        "Status": run.history.status,
        **_started(run),
        "Initial validation loss": _at_step(points[0] if points else None),
        "Final validation loss": _at_step(final) or "not evaluated",
        "Best validation loss": _at_step(min(points, key=last) if points else None),
        "Final validation perplexity": f"{math.exp(final[1]):,.2f}" if final and final[1] < 100 else None,
        **{label: _decimals(at.values[-1]) for label, at in at_lengths.items() if at.values.size},
        "First training loss": _decimals(run.reduced("lm_loss", first)),
        "Last training loss": _decimals(run.reduced("lm_loss", last)),
        "Completed steps": f"{int(steps[-1]) + 1:,}",
        "First recorded step": f"{int(steps[0]):,}" if steps[0] else None,
        "Steps without a record": _if_any(int(steps[-1] - steps[0]) + 1 - len(steps)),
        "Tokens": _whole(run.reduced("consumed_tokens", last)),
        "FLOPs": _count(run.reduced("flops", np.sum)),
        "FLOPs saved against the last window": _share(run.flops_saved()),
        "Time in training steps": _duration(times.sum()),
        "Step time, median (5 % to 95 % of steps)": _step_time(times),
        "Waiting for data": _duration(run.reduced("data_wait_s", np.sum)),
        "Stalled by saving": _duration(run.reduced("save_stall_s", np.sum)),
        "Median tokens/s": _whole(run.reduced("tokens_per_s", np.median)),
        "Median MFU": _share(run.reduced("mfu", np.median)),
        "Window, start → end": _span(run.reduced("window", first), run.reduced("window", last)),
        "Peak memory": _gibibytes(run.reduced("peak_memory_bytes", np.max)),
        "Volatility: mean std of loss over 10 steps": _decimals(steady.volatility),
        "Smoothness: mean loss change between steps": _decimals(steady.smoothness),
        "Mean loss ratio: loss / lowest before it": _decimals(steady.loss_ratio),
        "Mean of min(gradient norm, 1)": _decimals(steady.gradient_norm),
        "Loss spikes": _if_any(int(np.nansum(run.curve("spike").values))),
        "Steps that changed no weight": _if_any(int(np.nansum(run.curve("skipped").values))),
        "Non-finite steps, left out above": _if_any(int(np.count_nonzero(~finite & trained))),
        "Last standard deviation of token weights": _decimals(run.reduced("weight_std", last)),
        "Last largest token weight": _decimals(run.reduced("weight_max", last)),
        "Last share of tokens of weight 0": _share(run.reduced("zero_share", last)),
        "Last mean score": _decimals(run.reduced("score_mean", last)),
        "Time in scoring": _duration(run.reduced("score_time_s", np.sum)),
    }
    if (mixture := run.mixture()) is not None:
        for d in np.argsort(-mixture.tokens, kind="stable").tolist():
            asked = "" if math.isnan(mixture.asked[d]) else f", requested {mixture.asked[d]:.2%}"
            drawn = f"{mixture.shares[-1, d]:.2%} of the tokens{asked}; {mixture.rows[d]:,} rows"
            rows[f"Drawn from {mixture.names[d]}"] = drawn
    return {label: text for label, text in rows.items() if text is not None}


def _step_time(seconds: Column) -> str | None:
    if not seconds.size:
        return None
    low, median, high = np.quantile(seconds, [0.05, 0.5, 0.95])
    return f"{median:.3g} s ({low:.3g} to {high:.3g} s)"


def _started(run: Run) -> dict[str, str | None]:
    """Return the run's start according to its history, and when its last step was recorded."""
    rows: dict[str, str | None] = {"Starts": _if_any(len(run.history.starts))}
    if run.history.starts:
        newest = run.history.starts[-1]
        rows |= {
            "First started": str(run.history.starts[0]["time"]),
            "Host": str(newest["host"]),
            "Devices": str(newest["devices"]),
            "Layout": f"{newest['processes']} processes: {newest['layout']}",
            "Parameters": _count(newest["parameters"]),
            "Data": ", ".join(f"{part['name']} ({part['packing']})" for part in newest.get("data") or ()) or None,
        }
    if (moment := run.records[-1].get("time")) is not None:
        rows["Last recorded step"] = datetime.datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")
    return rows


# Charts


def charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield the charts of one or several runs, one color for each run; empty charts are omitted."""
    yield _losses(runs)
    for run in runs[1:]:
        if (found := paired_differences(runs[0], run)) is not None:
            bars = {"type": "data", "array": found.spreads, "thickness": 1}
            trace = go.Scatter(x=found.steps, y=found.means, error_y=bars, name=html.escape(run.name))
            title = f"Training loss of {run.name} minus that of {runs[0].name}"
            caption = "Means of spans of steps; bars: standard deviation over the steps of a span."
            yield Chart(title, _figure([trace], "nats / token"), caption)
    yield from _validations(runs)
    for key, title, unit in METRICS:
        traces, values = [], []
        for number, run in enumerate(runs):
            curve = run.curve(key).finite()
            if curve.values.any():
                traces += _curve(run, number, curve.steps, curve.values, alone=len(runs) == 1, exact=key in _EXACT)
                values.append(curve.values)
        if traces:
            yield Chart(title, _figure(traces, unit, log=is_log(key, np.concatenate(values))))
    for key, title, unit in ATTENTION:
        traces = [trace for number, run in enumerate(runs) for trace in _layers(run, number, key, len(runs) == 1)]
        if traces:
            yield Chart(title, _figure(traces, unit))
    for run in runs:
        if (mixture := run.mixture()) is not None:
            traces = []
            for place, d in enumerate(np.argsort(-mixture.tokens, kind="stable").tolist()):
                line = {"color": RUN_COLOURS[place % len(RUN_COLOURS)]}
                name = html.escape(mixture.names[d])
                traces.append(go.Scatter(x=mixture.steps, y=mixture.shares[:, d], name=name, line=line))
                if math.isfinite(mixture.asked[d]):
                    ends, asked = mixture.steps[[0, -1]], [mixture.asked[d]] * 2
                    dashed = {**line, "dash": "dash", "width": 1}
                    traces.append(go.Scatter(x=ends, y=asked, name=f"{name}, requested", line=dashed, showlegend=False))
            caption = "Share of all tokens drawn up to a step; dashed: as requested."
            yield Chart(f"Mixture as drawn by {run.name}", _figure(traces, "share of tokens"), caption)


def _losses(runs: Sequence[Run]) -> Chart:
    """Return the training loss of each run, with buttons for the x axis: steps, tokens, FLOPs or hours."""
    clocks = [clock for clock in CLOCKS if all(run.clock(clock) is not None for run in runs)]
    axes: dict[str, list[Column]] = {name: [] for name in ("steps", *clocks)}
    traces = []
    for number, run in enumerate(runs):
        losses, alone = run.curve("lm_loss"), len(runs) == 1
        for name, values in ((run.name, losses.values), (f"{run.name}, weighted", run.curve("train_loss").values)):
            weighted, known = values is not losses.values, np.isfinite(values)
            if weighted and not (alone and known.any()):
                continue
            if weighted and np.allclose(values[known], losses.values[known], rtol=1e-4, atol=0, equal_nan=True):
                continue
            kept, line = _kept(values[known]), {"color": RUN_COLOURS[number % len(RUN_COLOURS)]}
            shown = [(running_mean(values[known]), html.escape(name), 0.6 if weighted else 1.0)]
            if alone and not weighted:
                shown.insert(0, (values[known], "each step", 0.35))
            for y, label, opacity in shown:
                x = losses.steps[known][kept]
                traces.append(go.Scatter(x=x, y=y[kept], name=label, line=line, opacity=opacity))
                for axis, columns in axes.items():
                    clock = losses.steps if axis == "steps" else run.clock(axis)
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
    traces = []
    for number, run in enumerate(runs):
        by_length = run.validation_by_length() or {0: run.validation()}
        shades = sample_colorscale("Viridis", np.linspace(0.2, 0.85, max(len(by_length), 2)).tolist())
        for place, (length, curve) in enumerate(by_length.items()):
            known = curve.finite()
            if known.values.size:
                name = html.escape(", ".join(filter(None, [run.name, f"{length:,} tokens" if length else ""])))
                line = {"color": shades[place] if len(runs) == 1 else RUN_COLOURS[number % len(RUN_COLOURS)]}
                opacity = (place + 1) / len(by_length) if len(runs) > 1 else 1.0
                traces.append(
                    go.Scatter(
                        x=known.steps, y=known.values, name=name, line=line, opacity=opacity, mode="lines+markers"
                    )
                )
    if traces:
        yield Chart("Validation loss", _figure(traces, "nats / token"))
    traces = []
    for number, run in enumerate(runs):
        found = run.losses_by_position()
        steps = sorted(found)
        for step in (
            sorted({steps[0], steps[len(steps) // 2], steps[-1]} if len(runs) == 1 else {steps[-1]}) if steps else ()
        ):
            positions = sorted(found[step])
            losses = [found[step][position] for position in positions]
            line = {"color": RUN_COLOURS[number % len(RUN_COLOURS)]} if len(runs) > 1 else {}
            name = html.escape(f"{run.name}, after {step:,} steps")
            traces.append(go.Scatter(x=positions, y=losses, name=name, line=line, mode="lines+markers"))
    if traces:
        figure = _figure(traces, "nats / token", x="tokens that a token sees, itself included")
        figure.update_xaxes(type="log", dtick=math.log10(4))
        yield Chart("Validation loss by position", figure)


def _curve(run: Run, number: int, steps: Column, values: Column, *, alone: bool, exact: bool) -> list[go.Scatter]:
    """Return the trace of a metric: its running mean, drawn over its values if there is a single run."""
    line = {"color": RUN_COLOURS[number % len(RUN_COLOURS)]}
    kept, name = _kept(values), html.escape(run.name)
    if exact:
        return [go.Scatter(x=steps[kept], y=values[kept], name=name, line=line)]
    mean = go.Scatter(x=steps[kept], y=running_mean(values)[kept], name="mean" if alone else name, line=line)
    each = go.Scatter(x=steps[kept], y=values[kept], name="each step", line=line, opacity=0.35)
    return [each, mean] if alone else [mean]


def _layers(run: Run, number: int, key: str, alone: bool) -> Iterator[go.Scatter]:
    """Yield traces of a metric's mean over layers, and of each layer if there is a single run."""
    steps, values = run.by_layer(key)
    if not steps.size:
        return
    if alone:
        shades = sample_colorscale("Viridis", np.linspace(0.2, 0.85, max(values.shape[1], 2)).tolist())
        for layer, column in enumerate(values.T):
            line = {"color": shades[layer], "width": 1}
            yield go.Scatter(x=steps, y=column, name=f"layer {layer + 1}", line=line, showlegend=False)
    line = {"color": RUN_COLOURS[number % len(RUN_COLOURS)], "width": 3}
    yield go.Scatter(x=steps, y=values.mean(axis=1), name=f"{html.escape(run.name)}, mean of layers", line=line)


def _figure(traces: Sequence[go.Scatter], unit: str, *, x: str = "optimizer step", log: bool = False) -> go.Figure:
    figure = go.Figure(traces, {"template": _THEME, "showlegend": len(traces) > 1})
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=unit + (", log scale" if log else ""))
    if log:
        figure.update_yaxes(type="log", dtick="D2")
    return figure


def _kept(values: Column) -> np.ndarray:
    """Return the indices of the points to draw: for a long curve, the lowest and highest of each span."""
    if values.size <= _MOST_POINTS:
        return np.arange(values.size)
    spans = np.array_split(np.arange(values.size), _MOST_POINTS // 2)
    return np.concatenate([sorted({span[values[span].argmin()], span[values[span].argmax()]}) for span in spans])


# Formatting of numbers; None if a run has none


def _decimals(value: float | None) -> str | None:
    return None if value is None or math.isnan(value) else f"{value:.4f}"


def _at_step(point: tuple[int, float] | None) -> str | None:
    return None if point is None else f"{_decimals(point[1])} at step {point[0]:,}"


def _whole(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _if_any(count: int) -> str | None:
    return f"{count:,}" if count else None


def _count(value: float | None) -> str | None:
    """Format a number with three digits and a suffix, as 8.03B."""
    if value is None:
        return None
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _span(start: float | None, end: float | None) -> str | None:
    return None if start is None or end is None else f"{start:,.0f} → {end:,.0f} tokens"


def _gibibytes(value: float | None) -> str | None:
    return f"{value / 2**30:.2f} GiB" if value else None


def _duration(seconds: float | None) -> str | None:
    if not seconds:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"
