"""Read the metrics of finished, running or killed runs, and write a report: an HTML page with interactive charts.

The page is one file: plotly.js is part of it, nothing is loaded from the network.
"""

import html
import math
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from megatron_ext.arrays import Float64
from megatron_ext.checkpoint.history import History, local_time, read_history
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.monitoring.metrics import (
    EVALUATION_FILE,
    METRICS_FILE,
    Record,
    is_flat,
    read_by_step,
    read_metrics,
    scalars,
    stage_folders,
)
from megatron_ext.token_weighting.passage import PASSAGE_FILE, Passage

VOLATILITY_SPAN = 10  # SkyLadder's L[t-9..t]
RUN_COLORS = ("#2166ac", "#d95f02", "#1b8a6b", "#7a4fb3", "#c23b54", "#8a6a2f", "#3aa6c9", "#5b5f66")
METRICS = (  # metrics of training steps: key, title, unit
    ("lm_loss", "Training loss", "nats / token"),
    ("train_loss", "Weighted training loss", "nats / token"),
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
FIRST = ("Training loss", "Validation loss", "Context window", "Throughput")  # charts above the table
LOG_AXES = ("window", "effective_context", "grad_norm", "weight_max")
CLOCKS: dict[str, tuple[str, Callable[[Float64], Float64]]] = {  # other x axes of the training loss, from a metric
    "tokens": ("consumed_tokens", lambda tokens: tokens),
    "FLOPs": ("flops", np.cumsum),
    "hours of training steps": ("step_time_s", lambda seconds: np.cumsum(seconds) / 3600),
}
ATTENTION = (  # measured every --attention-health-interval steps: key, title, unit
    ("attention_entropy", "Attention entropy", "nats"),
    ("attention_sink_share", "Attention sinks", "share of heads"),
    ("attention_s_max_scaled", "Largest attention score", "after scaling"),
    ("attention_distance", "Attended distance", "tokens"),
)
MOST_POINTS = 200  # of a trace; longer curves are averaged
_THEME = go.layout.Template(  # legible on light and dark pages
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#7f8794"},
        "xaxis": {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False},
        "yaxis": {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False, "exponentformat": "SI"},
        "margin": {"l": 60, "r": 10, "t": 40, "b": 45},  # the tool bar and the windows are above the curves
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#7f8794", "activecolor": "#2166ac"},
        "legend": {"orientation": "h", "y": -0.32},
        "hovermode": "x unified",
        "height": 340,
    }
)


class Curve(NamedTuple):
    """The finite values [n] of a metric at increasing steps [n]."""

    steps: Float64
    values: Float64


Curves = Mapping[str, Curve]


@dataclass(frozen=True)
class Run:
    """The contents of a run folder."""

    name: str
    folder: Path
    steps: int  # completed, at least 1
    # by the names that TensorBoard shows: `attention_entropy/layer_1`; a step without trained tokens has no loss
    train: Curves
    validation: Curves  # here a step counts completed steps, so 0 is before training
    config: str  # text of config.yaml; empty if there is none
    passage: Passage | None  # with its latest token weights; None without token weighting
    history: History
    stages: Mapping[str, int] = field(default_factory=dict)  # the first step of each stage, for joined stages
    # first steps, and what is recorded of the datasets that are mixed from them on, by name
    mixtures: Sequence[tuple[int, Mapping[str, Record]]] = ()

    def curve(self, key: str) -> Curve:
        """Return a training metric; empty if no step has it."""
        return self.train.get(key, Curve(np.empty(0), np.empty(0)))


def parts(curves: Curves, key: str) -> dict[str, Curve]:
    """Return the curves of a metric with several values, by name: `layer_1` of `attention_entropy`."""
    prefix = f"{key}/"
    return {name.removeprefix(prefix): curve for name, curve in curves.items() if name.startswith(prefix)}


def load_run(folder: Path, name: str | None = None) -> Run:
    """Read a run folder; a half-written last line is ignored, and the last evaluation after each step counts.

    Raises:
        UserError: `metrics.jsonl` is missing, empty or corrupt.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path}: not found; give the folder that training was started with as --save")
    train = _curves(read_metrics(path))
    if "step" in train and (np.diff(train["step"].values) <= 0).any():
        # two trainers wrote, which is not prevented where the file system has no locks
        train = _curves(read_by_step(path).values())
    steps = train.pop("step", None)
    if steps is None:
        raise UserError(f"{path}: holds no complete step, a report needs at least one; train a step first")
    config = ""
    if (folder / "config.yaml").is_file():
        config = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    validation = _curves(read_by_step(folder / EVALUATION_FILE).values())
    validation.pop("step", None)
    passage = None
    if (folder / PASSAGE_FILE).is_file():
        passage = Passage.read(folder)
    history = read_history(folder)
    sources = {name: source for start in history.starts for name, source in start.get("sources", {}).items()}
    return Run(
        name=name or folder.resolve().name,
        folder=folder,
        steps=int(steps.values[-1]) + 1,
        train=train,
        validation=validation,
        config=config,
        passage=passage,
        history=history,
        mixtures=((0, sources),),
    )


def _curves(records: Iterable[Record]) -> dict[str, Curve]:
    """Return the curve of each metric, and the steps themselves as "step"; one record at a time is in memory."""
    # the numbers of records with the same names, one record after the other
    tables: dict[tuple[str, ...], array[float]] = defaultdict(lambda: array("d"))
    for record in records:
        numbers = record
        if not is_flat(record):
            numbers = {"step": record["step"], **dict(scalars(record))}
        if numbers.get("denominator") == 0:
            numbers = {name: number for name, number in numbers.items() if name not in ("lm_loss", "train_loss")}
        tables[tuple(numbers)].extend(numbers.values())
    parts: dict[str, list[Curve]] = defaultdict(list)
    for names, table in tables.items():
        columns = dict(zip(names, np.frombuffer(table).reshape(-1, len(names)).T, strict=True))
        for name, values in columns.items():
            parts[name].append(Curve(columns["step"], values))
    return {name: _in_order(curves) for name, curves in parts.items()}


def _in_order(curves: Sequence[Curve]) -> Curve:
    """Return the points of several curves as one, by increasing step."""
    if len(curves) == 1:
        return curves[0]
    steps, values = (np.concatenate(columns) for columns in zip(*curves, strict=True))
    order = np.argsort(steps, kind="stable")
    return Curve(steps[order], values[order])


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several different run folders; each is named by its path from the folder that they have in common.

    The stages of a run are joined.
    """
    if len(folders) == 1:
        return [load_whole(folders[0])]
    paths = [folder.resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"runs: got {path} twice, needs different runs; leave one of them out")
    common = os.path.commonpath(paths)
    return [replace(load_whole(path), name=str(path.relative_to(common))) for path in paths]


def load_whole(folder: Path) -> Run:
    """Read a run folder, and join its stages, if it has any; errors as `load_run`."""
    stages = stage_folders(folder)
    if not stages:
        return load_run(folder)
    return join_stages([load_run(stage) for stage in stages], folder)


def join_stages(stages: Sequence[Run], folder: Path) -> Run:
    """Join the stages of a run: steps are counted from the start of the run.

    `consumed_tokens` is left out, because each stage counts its tokens anew.
    """
    steps = 0
    marks = {}
    mixtures: list[tuple[int, Mapping[str, Record]]] = []
    train: dict[str, list[Curve]] = defaultdict(list)
    validation: dict[str, list[Curve]] = defaultdict(list)
    for run in stages:
        marks[run.name] = steps
        mixtures += [(first + steps, sources) for first, sources in run.mixtures]
        for joined, curves in ((train, run.train), (validation, run.validation)):
            for name, curve in curves.items():
                joined[name].append(Curve(curve.steps + steps, curve.values))
        steps += run.steps
    train.pop("consumed_tokens", None)
    return replace(
        stages[-1],
        name=folder.resolve().name,
        folder=folder,
        steps=steps,
        train={name: _in_order(curves) for name, curves in train.items()},
        validation={name: _in_order(curves) for name, curves in validation.items()},
        config="\n".join(f"# stage {run.name}\n{run.config}" for run in stages),
        history=replace(stages[-1].history, starts=tuple(start for run in stages for start in run.history.starts)),
        stages=marks,
        mixtures=mixtures,
    )


def _at_common_steps(first: Curve, second: Curve) -> tuple[Float64, Float64, Float64]:
    """Return the steps that both curves have, and the values of each at these steps."""
    steps, at_first, at_second = np.intersect1d(first.steps, second.steps, return_indices=True)
    return steps, first.values[at_first], second.values[at_second]


def loss_difference(first: Run, second: Run) -> tuple[float, float] | None:
    """Return the mean and the standard deviation of the training loss of `second` minus the loss of `first`, in nats.

    They are computed over the last tenth of the steps that both runs have, but at least ten; None if these steps are
    fewer than 20. Pairing by step removes the variation that both share because they read the same rows in the same
    order. Steps are correlated, so this is no confidence interval.
    """
    steps, losses, other_losses = _at_common_steps(first.curve("lm_loss"), second.curve("lm_loss"))
    if len(steps) < 20:
        return None
    last = (other_losses - losses)[-max(len(steps) // 10, 10) :]
    return float(np.mean(last)), float(np.std(last, ddof=1))


def stability(losses: npt.ArrayLike, gradient_norms: npt.ArrayLike) -> dict[str, float]:
    """Compute SkyLadder's four stability figures of at least 10 consecutive steps; lower is steadier.

    L_t is the training loss in nats and G_t the gradient norm before clipping, t = 1..n:

        volatility       mean over t >= 10 of Std(L[t-9..t]), the population standard deviation
        smoothness       mean over t >= 2 of |L_t - L_{t-1}|
        loss ratio       mean over t >= 2 of L_t / min(L_1..L_{t-1}); below 1 if the loss falls at every step
        min(norm, 1)     mean of min(G_t, 1)
    """
    loss = np.asarray(losses, dtype=np.float64)
    return {
        "volatility": np.lib.stride_tricks.sliding_window_view(loss, VOLATILITY_SPAN).std(axis=1).mean(),
        "smoothness": np.abs(np.diff(loss)).mean(),
        "loss ratio": (loss[1:] / np.minimum.accumulate(loss)[:-1]).mean(),
        "min(norm, 1)": np.minimum(gradient_norms, 1.0).mean(),
    }


def stability_between(run: Run, first: int, end: int) -> dict[str, float]:
    """Compute the stability figures of steps `first` to `end` - 1, ignoring steps that are not finite.

    Raises:
        UserError: fewer than 10 of these steps are recorded.
    """
    steps, losses, norms = _at_common_steps(run.curve("lm_loss"), run.curve("grad_norm"))
    chosen = (steps >= first) & (steps < end)
    if np.count_nonzero(chosen) < VOLATILITY_SPAN:
        raise UserError(
            f"stability_steps: got {first} {end}, of which {run.folder} has {np.count_nonzero(chosen)} finite steps, "
            f"needs {VOLATILITY_SPAN}; its last step is {run.steps - 1}"
        )
    return stability(losses[chosen], norms[chosen])


def write_report(runs: Sequence[Run], output: Path, evaluations: Sequence[Path] = ()) -> Path:
    """Write a page on runs of any state to `output`, in HTML; return its path.

    `evaluations` are --output folders of tools/evaluate.py, in addition to RUN/evaluations.

    Raises:
        UserError: a folder contains no evaluation.
    """
    tables: dict[Path, str] = {}
    for folder in [*(run.folder / "evaluations" for run in runs), *evaluations]:
        texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.rglob("*.md"))}
        if folder in evaluations and not texts:
            raise UserError(f"evaluations: got {folder}, which holds no .md; give the --output of tools/evaluate.py")
        tables |= texts
    notes = []
    for run in runs[1:]:
        difference = loss_difference(runs[0], run)
        if difference is not None:
            notes.append(
                f"Training loss of {run.name} minus that of {runs[0].name}, over the last tenth of their common steps: "
                f"mean {difference[0]:+.4f} nats, standard deviation over steps {difference[1]:.4f}. One seed each: "
                "this describes these two runs and says nothing about others."
            )
    columns = [table(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    title = runs[0].name
    if len(runs) > 1:
        title = f"Comparison of {len(runs)} runs"
    config = {"responsive": True, "displaylogo": False}
    template = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    text = jinja2.Template(template, autoescape=True, undefined=jinja2.StrictUndefined).render(
        title=title,
        plotly=get_plotlyjs(),
        runs=runs,
        colors=RUN_COLORS,
        rows=[(label, [column.get(label, "\N{EN DASH}") for column in columns]) for label in labels],
        notes=notes,
        first=FIRST,
        charts={
            name: figure.to_html(config=config, full_html=False, include_plotlyjs=False)
            for name, figure in charts(runs).items()
        },
        evaluations=tables,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as aside:
        aside.write_text(text, encoding="utf-8")
    return output


def _flops_saved(flops: Float64) -> float:
    """Return the share of FLOPs that is saved, compared with a run whose steps all cost as much as the last tenth."""
    return float(1 - flops.mean() / flops[-max(len(flops) // 10, 1) :].mean())


_SUMMARY: tuple[tuple[str, str, Callable[[Float64], float], Callable[[float], str]], ...] = (
    ("Last recorded step", "time", itemgetter(-1), local_time),
    ("Last training loss", "lm_loss", itemgetter(-1), "{:.4f}".format),
    ("Tokens", "consumed_tokens", itemgetter(-1), "{:,.0f}".format),
    ("FLOPs", "flops", np.sum, "{:.3g}".format),
    ("FLOPs saved against the last steps", "flops", _flops_saved, "{:z.1%}".format),
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
    for length, (steps, values) in _numbered(run, "by_length"):
        last = f"{values[-1]:.4f} after {steps[-1]:,.0f} steps"
        rows[f"Validation loss at {length:,} tokens"] = f"{last}, lowest {values.min():.4f}"
    for label, key, reduce, show in _SUMMARY:
        values = run.curve(key).values
        if values.size:
            rows[label] = show(reduce(values))
    trained = run.curve("denominator")
    finite = np.intersect1d(run.curve("lm_loss").steps, run.curve("grad_norm").steps)
    rows["Non-finite steps"] = f"{np.setdiff1d(trained.steps[trained.values != 0], finite).size:,}"
    return rows


def _numbered(run: Run, key: str) -> list[tuple[int, Curve]]:
    """Return the curves of a validation metric that has a value for each number of tokens, the lowest first."""
    return sorted((int(tokens), curve) for tokens, curve in parts(run.validation, key).items())


def charts(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """Return the charts of one or several runs by title, one color for each run; empty charts are omitted."""
    figures = {**dict.fromkeys(FIRST, go.Figure()), **_validations(runs)}  # this is their order
    for key, title, unit in METRICS:
        is_loss = key in ("lm_loss", "train_loss")
        traces = [
            trace
            for number, run in enumerate(runs)
            if run.curve(key).values.any() and (key != "train_loss" or "weight_std" in run.train)
            for trace in _steps(run.curve(key), run.name, number, extremes=True, smooth=is_loss)
        ]
        figures[title] = _figure(traces, unit, log=key in LOG_AXES, without_first=is_loss)
    for axis, (key, sum_up) in CLOCKS.items():
        traces = []
        for number, run in enumerate(runs):
            if key in run.train:
                (trace,) = _steps(run.curve("lm_loss"), run.name, number)
                steps, values = run.curve(key)
                traces.append(trace.update(x=np.interp(trace.x, steps, sum_up(values))))
        figures[f"Training loss by {axis}"] = _figure(traces, "nats / token", x=axis, without_first=True)
    for key, title, unit in ATTENTION:
        figures[title] = _figure(_attention(runs, key), unit)
    for run in runs:
        figures[f"Mixture as drawn by {run.name}"] = _figure(list(_mixture(run)), "share of tokens drawn so far")
    if len(runs) == 1:
        for title in FIRST:
            if figures[title].data:
                _shade_windows(figures[title], runs[0].curve("window"))
                _mark_stages(figures[title], runs[0].stages)
    return {title: figure for title, figure in figures.items() if figure.data}


def _attention(runs: Sequence[Run], key: str) -> list[go.Scatter]:
    """Draw a statistic of attention: the mean of the layers, and of a single run also each layer."""
    traces = []
    for number, run in enumerate(runs):
        layers = parts(run.train, key)
        if len(runs) == 1:
            for layer, (name, curve) in enumerate(layers.items(), start=1):
                opacity = layer / len(layers)
                traces.append(_trace(*curve, name, number, opacity=opacity, line_width=1, showlegend=False))
        if layers:
            means = np.mean([curve.values for curve in layers.values()], axis=0)
            traces.append(_trace(layers["layer_1"].steps, means, f"{run.name}, mean of layers", number))
    return traces


def _mark_stages(figure: go.Figure, stages: Mapping[str, int]) -> None:
    """Draw a line at the first step of each stage."""
    for name, first in stages.items():
        figure.add_vline(first, line={"dash": "dot", "color": "#7f8794"}, annotation_text=html.escape(name))


def _validations(runs: Sequence[Run]) -> dict[str, go.Figure]:
    """Draw the validation loss by step, for each evaluation length, and by position; and lm-eval's results."""
    by_step = []
    by_position = []
    tasks: dict[str, list[go.Scatter]] = defaultdict(list)  # by metric: metrics have scales of their own
    for number, run in enumerate(runs):
        for name, curve in parts(run.validation, "lm_eval").items():
            metric = re.sub(r"/\d+$", "", name).rpartition("/")[2]  # of TASK/METRIC or TASK/METRIC/LENGTH
            traces = tasks[metric]
            traces.append(_trace(*curve, f"{run.name}, {name}", number + len(traces), mode="lines+markers"))
        lengths = _numbered(run, "by_length")
        for place, (length, curve) in enumerate(lengths, start=1):
            style = {"mode": "lines+markers", "opacity": place / len(lengths)}
            by_step.append(_trace(*curve, f"{run.name}, {length:,} tokens", number, **style))
        by_position += _losses_by_position(run, number, with_first=len(runs) == 1)
    figure = _figure(by_position, "nats / token", x="tokens that a token sees, itself included")
    figure.update_xaxes(type="log", dtick=math.log10(4))
    return {
        "Validation loss": _figure(by_step, "nats / token"),
        "Validation loss by position": figure,
        **{f"lm-eval: {metric}": _figure(traces, metric) for metric, traces in tasks.items()},
    }


def _losses_by_position(run: Run, number: int, *, with_first: bool) -> list[go.Scatter]:
    """Draw the loss by position of the last validation, and perhaps of the first."""
    positions = _numbered(run, "by_position")
    if not positions:
        return []
    steps = np.unique(np.concatenate([curve.steps for _, curve in positions]))
    traces = []
    for place, step in enumerate(steps[[0, -1]] if with_first else steps[-1:]):
        means = {n: mean for n, curve in positions for at, mean in zip(*curve, strict=True) if at == step}
        name = f"{run.name}, after {step:,.0f} steps"
        traces.append(_trace(list(means), list(means.values()), name, number + place, mode="lines+markers"))
    return traces


def _mixture(run: Run) -> Iterator[go.Scatter]:
    """Draw the share of each dataset in all tokens drawn up to a step, and dashed as requested in each stage.

    A row counts as the average tokens of its dataset. Nothing is drawn without a record of the datasets.
    """
    drawn = parts(run.train, "source_rows")
    firsts = [first for first, _ in run.mixtures]
    tokens_by_name = {}
    for name, curve in drawn.items():
        row_tokens = np.array([sources.get(name, {}).get("row_tokens", np.nan) for _, sources in run.mixtures])
        stage = np.searchsorted(firsts, curve.steps, side="right") - 1
        tokens_by_name[name] = Curve(curve.steps, np.cumsum(curve.values * row_tokens[stage]))
    if not drawn or np.isnan([curve.values[-1] for curve in tokens_by_name.values()]).any():
        return
    steps = np.unique(np.concatenate([curve.steps for curve in drawn.values()]))
    shares = [np.interp(steps, curve.steps, curve.values, left=0) for curve in tokens_by_name.values()]
    total = np.sum(shares, axis=0)
    style = {"line_dash": "dash", "line_width": 1, "showlegend": False}
    for number, (name, of_source) in enumerate(zip(drawn, shares, strict=True)):
        yield _trace(steps, of_source / total, name, number)
        for (first, sources), end in zip(run.mixtures, [*firsts[1:], steps[-1]], strict=True):
            if name in sources:
                share = sources[name]["share"]
                yield _trace([first, end], [share, share], f"{name}, requested", number, **style)


def _shade_windows(figure: go.Figure, windows: Curve) -> None:
    """Shade the steps of each doubling of the window, darker for longer windows, with the longest of each above."""
    doublings = np.floor(np.log2(np.maximum(windows.values, 1)))
    starts = np.flatnonzero(np.diff(doublings, prepend=np.nan))
    if len(starts) < 2:
        return
    if len(starts) > MOST_POINTS:  # spans narrower than can be seen: each bin has its longest window's shade
        bins = np.linspace(0, len(doublings), MOST_POINTS, endpoint=False, dtype=np.int64)
        highest = np.maximum.reduceat(doublings, bins)
        changes = np.flatnonzero(np.diff(highest, prepend=np.nan))
        starts = bins[changes]
        doublings = np.repeat(highest, np.diff(bins, append=len(doublings)))
    borders = np.append(windows.steps[starts], windows.steps[-1] + 1)
    longest = np.maximum.reduceat(windows.values, starts)
    shades = 0.02 + 0.2 * (doublings[starts] - doublings.min()) / max(np.ptp(doublings), 1)
    shapes = []
    notes = []
    place = {"xref": "x", "yref": "y domain"}
    style = {"type": "rect", "y0": 0, "y1": 1, "fillcolor": "#7f8794", "line_width": 0, "layer": "below"}
    text_style = {"y": 1, "xanchor": "center", "yanchor": "bottom", "showarrow": False, "font_size": 11}
    for x0, x1, shade, window in zip(borders[:-1], borders[1:], shades, longest, strict=True):
        shapes.append(go.layout.Shape(x0=x0, x1=x1, opacity=shade, **place, **style))
        if x1 - x0 > 0.08 * (borders[-1] - borders[0]):  # its text has room
            notes.append(go.layout.Annotation(x=(x0 + x1) / 2, text=f"{window:,.0f}", **place, **text_style))
    # one by one, each would copy all before it
    figure.update_layout(shapes=[*figure.layout.shapes, *shapes], annotations=[*figure.layout.annotations, *notes])


def _smooth(values: Float64) -> Float64:
    """Return centered means over a 25th of the values, at least 5.

    Near the ends, each mean covers fewer values, as many on each side.
    """
    at = np.arange(values.size)
    reach = np.minimum(at, at[::-1]).clip(max=max(values.size // 50, 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)


def _steps(curve: Curve, name: str, number: int, *, extremes: bool = False, smooth: bool = False) -> list[go.Scatter]:
    """Draw a metric: means over at most `MOST_POINTS` spans of steps, perhaps their extremes or a smoothed curve."""
    size = curve.steps.size
    starts = np.linspace(0, size, min(size, MOST_POINTS), endpoint=False, dtype=np.int64)
    steps = curve.steps[starts]
    values = curve.values
    lowest = np.minimum.reduceat(values, starts)
    highest = np.maximum.reduceat(values, starts)
    means = np.add.reduceat(values, starts) / np.diff(starts, append=size)
    means = means.clip(lowest, highest)  # the axis of a constant metric would show nothing but rounding
    traces = [_trace(steps, means, name, number)]
    if extremes and size > MOST_POINTS:
        spans = np.stack([lowest, highest], axis=1)
        label = f"{name}, lowest and highest"
        traces.insert(0, _trace(np.repeat(steps, 2), spans.ravel(), label, number, opacity=0.35, showlegend=False))
    if smooth:
        for trace in traces:
            trace.update(opacity=0.35, line_width=1, showlegend=False)
        traces.append(_trace(steps, _smooth(values)[starts], f"{name}, smoothed", number))
    return traces


def _trace(x: Any, y: Any, name: str, number: int, **style: Any) -> go.Scatter:
    color = RUN_COLORS[number % len(RUN_COLORS)]
    return go.Scatter(x=x, y=y, name=html.escape(name), line_color=color, **style)


def _figure(
    traces: Sequence[go.Scatter],
    unit: str,
    *,
    x: str = "optimizer step",
    log: bool = False,
    without_first: bool = False,
) -> go.Figure:
    """Draw traces over `x`, with a logarithmic y axis if `log`.

    `without_first` leaves the high losses of the first steps above the y axis, where double-click shows them.
    """
    figure = go.Figure(traces, {"template": _THEME, "showlegend": len(traces) > 1})
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=unit)
    if log:
        figure.update_yaxes(title=f"{unit}, log scale", type="log", dtick="D2")
    values = np.concatenate([np.empty(0), *(trace.y for trace in traces)])
    if without_first and values.size > 50:
        low, high = np.quantile(values, [0, 0.97])
        margin = (high - low) / 20
        figure.update_yaxes(range=[low - margin, high + margin])
    return figure
