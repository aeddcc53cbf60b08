"""Chooses and draws the charts of a run's page, and of several runs'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from megatron_ext.monitoring import panels
from megatron_ext.monitoring.panels import RUN_COLOURS, WEIGHTING_PANELS
from megatron_ext.monitoring.runs import WEIGHTING, Curve, Run, paired_differences
from megatron_ext.pages import colours
from megatron_ext.pages.charts import Chart, draw

ATTENTION = (  # measured every --attention-health-interval steps: key, title, unit
    ("attention_entropy", "Attention entropy", "nats"),
    ("attention_sink_share", "Attention sinks", "share of heads"),
    ("attention_s_max_scaled", "Largest attention score", "as the softmax sees it"),
    ("attention_distance", "Attended distance", "tokens"),
    ("attention_clipped", "Heads clipped", "heads"),
)
CLOCKS = ("consumed_tokens", "flops", "hours")  # what a loss can be held against, beside steps
_CLOCK_TITLES = {"consumed_tokens": "tokens", "flops": "FLOPs", "hours": "hours in steps"}


def run_charts(run: Run) -> Iterator[Chart]:
    """Draw the charts of one run; those that would be empty are left out."""
    yield draw("Loss", lambda axis: panels.loss_panel(axis, run))
    if run.validation_by_length():
        yield draw("Validation loss by evaluation length", lambda axis: panels.last_panel(axis, run))
    if run.losses_by_position():
        yield draw("Loss by position", lambda axis: _position_panel(axis, run))
    for clock in CLOCKS:
        if run.clock(clock) is not None:
            yield draw(f"Loss against {_CLOCK_TITLES[clock]}", partial(_against, runs=[run], clock=clock))
    yield draw("Context window", lambda axis: panels.window_panel(axis, run))
    yield draw("Effective context", lambda axis: panels.effective_context_panel(axis, run))
    contexts = run.curve("effective_context").finite().values
    if contexts.size > 1:
        yield draw("Effective context, how often", lambda axis: _histogram(axis, contexts))
    for key, title, unit, colour, log in (
        ("tokens_per_s", "Throughput", "tokens / s", colours.BROWN, False),
        ("mfu", "Model FLOPs utilisation", "share of the cards' peak", colours.BROWN, False),
        ("grad_norm", "Gradient norm before clipping", "L2 norm", colours.RED, True),
        ("learning_rate", "Learning rate", "", colours.SLATE, False),
        ("moe_aux_loss", "Load balance of experts", "loss", colours.PINK, False),
        ("data_wait_s", "Waiting for data", "seconds of a step", colours.SLATE, False),
        ("save_stall_s", "Held up by saving", "seconds before a step", colours.SLATE, False),
        *((key, *panel, key == "weight_max") for key, panel in zip(WEIGHTING, WEIGHTING_PANELS, strict=True)),
    ):
        curve = run.curve(key)
        if curve.finite().values.any() or (key == "learning_rate" and curve.finite().values.size):
            yield draw(title, _curve(curve, colour, title, unit, log=log))
    for key, title, unit in ATTENTION:
        if run.by_layer(key)[0].size:
            yield draw(f"{title} by layer", partial(_by_layer, run=run, key=key, unit=unit))


def comparison_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Draw the charts of several runs, one colour each, as `RUN_COLOURS` has them."""
    for key, title, unit in (
        ("lm_loss", "Training loss", "nats / token"),
        ("valid_loss", "Validation loss", "nats / token"),
    ):
        yield draw(title, partial(panels.comparison_panel, runs=runs, key=key, title=title, unit=unit))
    for index, run in enumerate(runs[1:], start=1):
        if paired_differences(runs[0], run) is not None:
            title = f"Training loss of {run.name} less that of {runs[0].name}"
            yield draw(title, _difference(runs[0], run, RUN_COLOURS[index % len(RUN_COLOURS)]))
    for clock in CLOCKS:
        if all(run.clock(clock) is not None for run in runs):
            title = f"Training loss against {_CLOCK_TITLES[clock]}"
            yield draw(title, partial(_against, runs=runs, clock=clock))
    for key, title, unit in (
        ("window", "Context window", "tokens"),
        ("effective_context", "Effective context", "tokens"),
        ("tokens_per_s", "Throughput", "tokens / s"),
        ("grad_norm", "Gradient norm before clipping", "L2 norm"),
        ("learning_rate", "Learning rate", ""),
        *((key, *panel[:2]) for key, panel in zip(WEIGHTING, WEIGHTING_PANELS, strict=True)),
    ):
        if any(run.curve(key).finite().values.size for run in runs):
            yield draw(title, partial(panels.comparison_panel, runs=runs, key=key, title=title, unit=unit))


def _curve(curve: Curve, colour: str, title: str, unit: str, *, log: bool) -> Callable[[Axes], None]:
    smooth, from_zero = title != "Learning rate", not log and title != "Learning rate"

    def paint(axis: Axes) -> None:
        panels.curve_panel(axis, curve, colour, title, unit, log=log, smooth=smooth, from_zero=from_zero)
        if axis.get_yscale() == "log":
            axis.set_ylabel(f"{unit}, log scale")

    return paint


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
    shades = matplotlib.colormaps[panels.LENGTH_COLOURS](np.linspace(0.85, 0.15, values.shape[1]))
    for colour, layer in zip(shades, values.T, strict=True):
        axis.plot(steps, layer, color=colour, alpha=0.5, linewidth=0.9)
    axis.plot(steps, values.mean(axis=1), color=colours.RED, label=f"mean of {values.shape[1]} layers")
    axis.legend()


def _position_panel(axis: Axes, run: Run) -> None:
    """Draw the loss by position of the first, middle and last evaluations that have it."""
    found = run.losses_by_position()
    steps = sorted(found)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    shades = matplotlib.colormaps[panels.LENGTH_COLOURS](np.linspace(0.8, 0.2, len(chosen)))
    for step, colour in zip(chosen, shades, strict=True):
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
    axis.hist(contexts, bins=min(40, max(5, contexts.size // 5)), color=colours.PURPLE)
    axis.set_xlabel("effective context of a step's rows (tokens)")
    axis.set_ylabel("steps")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.tokens_text(value)))


def _difference(first: Run, other: Run, colour: str) -> Callable[[Axes], None]:
    def paint(axis: Axes) -> None:
        found = paired_differences(first, other)
        assert found is not None
        panels.finish(axis, "", "nats / token")
        axis.axhline(0.0, color=colours.GREY, linewidth=1.0)
        axis.errorbar(found.steps, found.means, yerr=found.half_widths, fmt="o-", color=colour, markersize=3)
        low, high = np.nanquantile(found.means, [0.05, 0.95])
        margin = max(0.6 * (high - low), 2 * float(np.nanmedian(found.half_widths)), 1e-6)
        axis.set_ylim(min(low, 0.0) - margin, max(high, 0.0) + margin)

    return paint
