"""Chooses and draws the charts of a run's page, and of several runs'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from megatron_ext.monitoring import panels
from megatron_ext.monitoring.mixture import DrawnMixture, drawn_mixture
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


_SIGNIFICANT = (
    "Means of spans of steps with 95 % intervals, paired by step, steps taken as independent; filled where the "
    "interval leaves 0 out."
)
_MIXTURE = "Share of all tokens drawn up to a step; dashed: as asked for."


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
    if (mixture := drawn_mixture(run)) is not None:
        yield draw("Mixture as drawn", partial(_mixture_panel, mixture=mixture), caption=_MIXTURE)
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
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            yield draw(title, _difference(runs[0], run, colour), caption=_SIGNIFICANT)
    for clock in CLOCKS:
        if all(run.clock(clock) is not None for run in runs):
            title = f"Training loss against {_CLOCK_TITLES[clock]}"
            yield draw(title, partial(_against, runs=runs, clock=clock))
    for key, title, unit in (
        ("window", "Context window", "tokens"),
        ("effective_context", "Effective context", "tokens"),
        ("tokens_per_s", "Throughput", "tokens / s"),
        ("mfu", "Model FLOPs utilisation", "share of the cards' peak"),
        ("grad_norm", "Gradient norm before clipping", "L2 norm"),
        ("learning_rate", "Learning rate", ""),
        ("data_wait_s", "Waiting for data", "seconds of a step"),
        *((key, *panel[:2]) for key, panel in zip(WEIGHTING, WEIGHTING_PANELS, strict=True)),
    ):
        if any(run.curve(key).finite().values.size for run in runs):
            yield draw(title, partial(panels.comparison_panel, runs=runs, key=key, title=title, unit=unit))
    if any(run.losses_by_position() for run in runs):
        yield draw("Loss by position, last evaluation", partial(_positions_compared, runs=runs))
    for key, title, unit in ATTENTION:
        if any(run.by_layer(key)[0].size for run in runs):
            yield draw(f"{title}, mean of layers", partial(_layers_compared, runs=runs, key=key, unit=unit))


def _curve(curve: Curve, colour: str, title: str, unit: str, *, log: bool) -> Callable[[Axes], None]:
    smooth, from_zero = title != "Learning rate", not log and title != "Learning rate"

    return partial(
        panels.curve_panel, curve=curve, colour=colour, title=title, unit=unit, log=log, smooth=smooth,
        from_zero=from_zero,
    )  # fmt: skip


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
    shades = matplotlib.colormaps[panels.LENGTH_COLOURS](np.linspace(*panels.LENGTH_SHADES, values.shape[1]))
    for colour, layer in zip(shades, values.T, strict=True):
        axis.plot(steps, layer, color=colour, alpha=0.5, linewidth=0.9)
    axis.plot(steps, values.mean(axis=1), color=colours.RED, label=f"mean of {values.shape[1]} layers")
    axis.legend()


def _layers_compared(axis: Axes, runs: Sequence[Run], key: str, unit: str) -> None:
    panels.finish(axis, "", unit)
    for index, run in enumerate(runs):
        steps, values = run.by_layer(key)
        if steps.size:
            axis.plot(steps, values.mean(axis=1), color=RUN_COLOURS[index % len(RUN_COLOURS)], label=run.name)
    axis.legend()


def _positions_compared(axis: Axes, runs: Sequence[Run]) -> None:
    """Draw the loss by position of each run's last evaluation that has it."""
    shown: set[int] = set()
    for index, run in enumerate(runs):
        found = run.losses_by_position()
        if found:
            _positions(axis, found, max(found), RUN_COLOURS[index % len(RUN_COLOURS)], run.name)
            shown |= found[max(found)].keys()
    _scale_positions(axis, sorted(shown))


def _position_panel(axis: Axes, run: Run) -> None:
    """Draw the loss by position of the first, middle and last evaluations that have it."""
    found = run.losses_by_position()
    steps = sorted(found)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    shades = matplotlib.colormaps[panels.LENGTH_COLOURS](np.linspace(*panels.LENGTH_SHADES, len(chosen)))
    for step, colour in zip(chosen, shades, strict=True):
        _positions(axis, found, step, colour, f"after {step:,} steps")
    _scale_positions(axis, sorted(found[steps[-1]]))


def _positions(axis: Axes, found: Mapping[int, Mapping[int, float]], step: int, colour: Any, label: str) -> None:
    positions = sorted(found[step])
    losses = [found[step][position] for position in positions]
    axis.plot(positions, losses, "o-", color=colour, markersize=3.5, label=label)


def _scale_positions(axis: Axes, positions: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(positions[:: max(len(positions) // 6, 1)]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.tokens_text(value)))
    axis.set_xlabel("tokens that a token sees, itself included (log scale)")
    axis.set_ylabel("nats / token")
    axis.legend()


def _mixture_panel(axis: Axes, mixture: DrawnMixture) -> None:
    """Draw each data set's share of the tokens so far, and beside it the share that was asked for."""
    panels.finish(axis, "", "share of tokens")
    names = sorted(range(len(mixture.names)), key=lambda d: -mixture.tokens[d])
    for place, d in enumerate(names):
        colour = RUN_COLOURS[place % len(RUN_COLOURS)]
        label = mixture.names[d] if place < len(RUN_COLOURS) else None  # the table has them all
        axis.plot(mixture.steps, mixture.shares[:, d], color=colour, linewidth=1.4, label=label)
        if np.isfinite(mixture.asked[d]):
            axis.axhline(mixture.asked[d], color=colour, linewidth=0.9, linestyle="--")
    axis.set_ylim(bottom=0.0)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend()


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
        axis.plot(found.steps, found.means, color=colour, linewidth=1.2)
        axis.errorbar(found.steps, found.means, yerr=found.half_widths, fmt="none", color=colour, linewidth=1.0)
        for chosen, fill in ((found.significant, colour), (~found.significant, "none")):
            axis.scatter(found.steps[chosen], found.means[chosen], s=16, color=fill, edgecolors=colour, zorder=3)
        low, high = np.nanquantile(found.means, [0.05, 0.95])
        margin = max(0.6 * (high - low), 2 * float(np.nanmedian(found.half_widths)), 1e-6)
        axis.set_ylim(min(low, 0.0) - margin, max(high, 0.0) + margin)

    return paint
