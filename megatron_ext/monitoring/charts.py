"""Draws the charts of a page: each an SVG of its own, whose colours are the page's, so that it can be dark or light.

Text stays text, sized for a card of 330 to 420 pixels. matplotlib draws; what it writes for a file of its own (names of
XML, a style sheet, identifiers that the next chart would repeat) is taken out.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from megatron_ext.monitoring import panels
from megatron_ext.monitoring.panels import RUN_COLOURS, STYLE, WEIGHTING_PANELS
from megatron_ext.monitoring.runs import WEIGHTING, Curve, Run, paired_differences

WIDTH, HEIGHT = 5.0, 3.3  # inches of 72 units: about the pixels of a card
CARD: dict[Any, Any] = STYLE | {"svg.fonttype": "none", "text.color": "#374151", "figure.constrained_layout.use": True}
PAGE_COLOURS = {  # matplotlib's -> the page's variable, which has a value for light and one for dark
    "#000000": "ink",
    "#374151": "ink",
    "#4b5563": "soft",
    "#6b7280": "soft",
    "#9ca3af": "soft",
    "#e5e7eb": "line",
    panels.BLUE: "blue",
    panels.ORANGE: "orange",
    panels.GREEN: "green",
    panels.PURPLE: "purple",
    panels.RED: "red",
    panels.BROWN: "brown",
    panels.SKY: "sky",
    panels.SLATE: "slate",
    panels.PINK: "pink",
}
ATTENTION = (  # measured every --attention-health-interval steps: key, title, unit
    ("attention_entropy", "Attention entropy", "nats"),
    ("attention_sink_share", "Attention sinks", "share of heads"),
    ("attention_s_max_scaled", "Largest attention score", "as the softmax sees it"),
    ("attention_distance", "Attended distance", "tokens"),
)
CLOCKS = ("consumed_tokens", "flops", "hours")  # what a loss can be held against, beside steps
_CLOCK_TITLES = {"consumed_tokens": "tokens", "flops": "FLOPs", "hours": "hours in steps"}


@dataclass(frozen=True)
class Chart:
    """Holds a chart of a page.

    Attributes:
        title: its heading.
        svg: to stand in an HTML page.
        words: what it shows, for those who cannot see it.
    """

    title: str
    svg: str
    words: str


def run_charts(run: Run) -> Iterator[Chart]:
    """Draw the charts of one run; those that would be empty are left out."""
    yield _chart("Loss", lambda axis: panels.loss_panel(axis, run))
    if run.validation_by_length():
        yield _chart("Validation loss by evaluation length", lambda axis: panels.last_panel(axis, run))
    if run.losses_by_position():
        yield _chart("Loss by position", lambda axis: _position_panel(axis, run))
    for clock in CLOCKS:
        if run.clock(clock) is not None:
            yield _chart(f"Loss against {_CLOCK_TITLES[clock]}", partial(_against, runs=[run], clock=clock))
    yield _chart("Context window", lambda axis: panels.window_panel(axis, run))
    yield _chart("Effective context", lambda axis: panels.effective_context_panel(axis, run))
    contexts = run.curve("effective_context").finite().values
    if contexts.size > 1:
        yield _chart("Effective context, how often", lambda axis: _histogram(axis, contexts))
    for key, title, unit, colour, log in (
        ("tokens_per_s", "Throughput", "tokens / s", panels.BROWN, False),
        ("mfu", "Model FLOPs utilisation", "share of the cards' peak", panels.BROWN, False),
        ("grad_norm", "Gradient norm before clipping", "L2 norm", panels.RED, True),
        ("learning_rate", "Learning rate", "", panels.SLATE, False),
        ("data_wait_s", "Waiting for data", "seconds of a step", panels.SLATE, False),
        ("save_stall_s", "Held up by saving", "seconds before a step", panels.SLATE, False),
        *((key, *panel, key == "weight_max") for key, panel in zip(WEIGHTING, WEIGHTING_PANELS, strict=True)),
    ):
        curve = run.curve(key)
        if curve.finite().values.any() or (key == "learning_rate" and curve.finite().values.size):
            yield _chart(title, _curve(curve, colour, title, unit, log=log))
    for key, title, unit in ATTENTION:
        if run.by_layer(key)[0].size:
            yield _chart(f"{title} by layer", partial(_by_layer, run=run, key=key, unit=unit))


def comparison_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Draw the charts of several runs, one colour each, as `RUN_COLOURS` has them."""
    for key, title, unit in (
        ("lm_loss", "Training loss", "nats / token"),
        ("valid_loss", "Validation loss", "nats / token"),
    ):
        yield _chart(title, partial(panels.comparison_panel, runs=runs, key=key, title=title, unit=unit))
    for index, run in enumerate(runs[1:], start=1):
        if paired_differences(runs[0], run) is not None:
            title = f"Training loss of {run.name} less that of {runs[0].name}"
            yield _chart(title, _difference(runs[0], run, RUN_COLOURS[index % len(RUN_COLOURS)]))
    for clock in CLOCKS:
        if all(run.clock(clock) is not None for run in runs):
            title = f"Training loss against {_CLOCK_TITLES[clock]}"
            yield _chart(title, partial(_against, runs=runs, clock=clock))
    for key, title, unit in (
        ("window", "Context window", "tokens"),
        ("effective_context", "Effective context", "tokens"),
        ("tokens_per_s", "Throughput", "tokens / s"),
        ("grad_norm", "Gradient norm before clipping", "L2 norm"),
        ("learning_rate", "Learning rate", ""),
        *((key, *panel[:2]) for key, panel in zip(WEIGHTING, WEIGHTING_PANELS, strict=True)),
    ):
        if any(run.curve(key).finite().values.size for run in runs):
            yield _chart(title, partial(panels.comparison_panel, runs=runs, key=key, title=title, unit=unit))


def _chart(title: str, draw: Callable[[Axes], None]) -> Chart:
    with matplotlib.rc_context(CARD | {"svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        axis = figure.add_subplot()
        draw(axis)
        axis.set_title("", loc="left")  # the page's heading says it
        figure.patch.set_visible(False)
        axis.patch.set_visible(False)
        if (legend := axis.get_legend()) is not None:
            legend.get_frame().set_visible(False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        scale = "; a logarithmic axis" if axis.get_yscale() == "log" else ""
        words = f"{title}: {axis.get_ylabel() or 'value'} over {axis.get_xlabel()}{scale}"
    return Chart(title, for_page(text.getvalue()), words)


def for_page(svg: str) -> str:
    """Make matplotlib's SVG file an element of an HTML page, as the module says.

    Args:
        svg: the text of the file; its own size is dropped, so the page's style decides.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    for colour, name in PAGE_COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", svg)
    return svg.replace("<svg ", '<svg role="img" ', 1)


def _curve(curve: Curve, colour: str, title: str, unit: str, *, log: bool) -> Callable[[Axes], None]:
    smooth, from_zero = title != "Learning rate", not log and title != "Learning rate"

    def draw(axis: Axes) -> None:
        panels.curve_panel(axis, curve, colour, title, unit, log=log, smooth=smooth, from_zero=from_zero)
        if axis.get_yscale() == "log":
            axis.set_ylabel(f"{unit}, log scale")

    return draw


def _against(axis: Axes, runs: Sequence[Run], clock: str) -> None:
    panels.finish(axis, "", "nats / token")
    for index, run in enumerate(runs):
        time, loss = run.clock(clock), run.curve("lm_loss")
        assert time is not None
        known = np.isfinite(loss.values) & np.isfinite(time)
        smooth = panels.running_mean(loss.values[known])
        axis.plot(time[known], smooth, color=RUN_COLOURS[index % len(RUN_COLOURS)], label=run.name)
    panels.clip_training(axis, [run.curve("lm_loss") for run in runs])
    if len(runs) > 1:
        axis.legend(loc="upper right")
    axis.set_xlabel(_CLOCK_TITLES[clock])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.short_number(value)))


def _by_layer(axis: Axes, run: Run, key: str, unit: str) -> None:
    """Draw a pale line for each layer, the deepest darkest, and their mean."""
    panels.finish(axis, "", unit)
    steps, values = run.by_layer(key)
    colours = matplotlib.colormaps[panels.LENGTH_COLOURS](np.linspace(0.85, 0.15, values.shape[1]))
    for colour, layer in zip(colours, values.T, strict=True):
        axis.plot(steps, layer, color=colour, alpha=0.5, linewidth=0.9)
    axis.plot(steps, values.mean(axis=1), color=panels.RED, label=f"mean of {values.shape[1]} layers")
    axis.legend()


def _position_panel(axis: Axes, run: Run) -> None:
    """Draw the loss by position of the first, middle and last evaluations that have it."""
    found = run.losses_by_position()
    steps = sorted(found)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    colours = matplotlib.colormaps[panels.LENGTH_COLOURS](np.linspace(0.8, 0.2, len(chosen)))
    for step, colour in zip(chosen, colours, strict=True):
        positions = sorted(found[step])
        losses = [found[step][position] for position in positions]
        axis.plot(positions, losses, "o-", color=colour, markersize=3.5, label=f"after {step:,} steps")
    positions = sorted(found[steps[-1]])
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(positions[:: max(len(positions) // 6, 1)]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.tokens_text(value)))
    axis.set_xlabel("tokens that a token sees, itself included (log scale)")
    axis.set_ylabel("nats / token")
    axis.legend(loc="upper right")


def _histogram(axis: Axes, contexts: panels.Column) -> None:
    axis.hist(contexts, bins=min(40, max(5, contexts.size // 5)), color=panels.PURPLE)
    axis.set_xlabel("effective context of a step's rows (tokens)")
    axis.set_ylabel("steps")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.tokens_text(value)))


def _difference(first: Run, other: Run, colour: str) -> Callable[[Axes], None]:
    def draw(axis: Axes) -> None:
        found = paired_differences(first, other)
        assert found is not None
        panels.finish(axis, "", "nats / token")
        axis.axhline(0.0, color=panels.GREY, linewidth=1.0)
        axis.errorbar(found.steps, found.means, yerr=found.half_widths, fmt="o-", color=colour, markersize=3)
        low, high = np.nanquantile(found.means, [0.05, 0.95])
        margin = max(0.6 * (high - low), 2 * float(np.nanmedian(found.half_widths)), 1e-6)
        axis.set_ylim(min(low, 0.0) - margin, max(high, 0.0) + margin)

    return draw
