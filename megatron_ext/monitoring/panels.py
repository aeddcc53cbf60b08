"""Draws one curve, or the same curve of several runs, on matplotlib's axes: what is in a panel, whoever lays it out.

One colour means one quantity in a single run's figure, and one run in a comparison. Raw values are drawn
pale, their running mean strong.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from megatron_ext.monitoring.runs import WEIGHTING, Column, Curve, Run
from megatron_ext.pages.colours import BLUE, BROWN, GREEN, GREY, ORANGE, PINK, PURPLE, RED, SKY, SLATE

RUN_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, BROWN, SKY, SLATE)
LENGTH_COLOURS, LENGTH_SHADES = "viridis", (0.85, 0.36)  # from light to dark, seen on white and on black
WEIGHTING_PANELS = (  # of WEIGHTING: title, unit, colour
    ("Spread of weights", "standard deviation", SKY),
    ("Largest weight", "weight", SKY),
    ("Tokens of weight 0", "share of tokens", SKY),
    ("Mean score", "score", PINK),
)
_LOG_FROM = 8  # a quantity whose largest value is this many times its smallest gets a logarithmic axis
_FEW_POINTS = 40  # up to here each point of a curve gets a marker
_MANY_POINTS = 1000  # from here raw values overlap into a band and are drawn paler
_CLIP_FROM = 50  # with this many steps the loss axis ends above 97 % of them, not at the first
_CLIP_VALIDATION_FROM = 4  # with this many evaluations each run's first may stay off the axis


def loss_panel(axis: Axes, run: Run) -> None:
    finish(axis, "Loss", "nats / token")
    train, validation = run.curve("lm_loss"), run.validation().finite()
    objective = run.curve("train_loss")
    weighted = bool(np.any(np.abs(objective.values - train.values) > 1e-4 * np.abs(train.values)))
    if not _raw_and_mean(axis, train, BLUE, "training"):
        return
    if weighted:
        known = objective.finite()
        axis.plot(known.steps, running_mean(known.values), color=PURPLE, linestyle="--", label="training, weighted")
    top = clip_training(axis, [train], _highest([validation]))
    shown = _below(validation, top)
    if shown.values.size:
        axis.plot(shown.steps, shown.values, "o-", color=ORANGE, markersize=4.5, label="validation")
    axis.legend(loc="upper right")


def window_panel(axis: Axes, run: Run) -> None:
    finish(axis, "Context window", "tokens")
    window = run.curve("window").finite()
    if not window.values.size:
        _no_data(axis)
        return
    _plot(axis, window, GREEN, drawstyle="steps-post", linewidth=2.2)
    _token_scale(axis, [window])


def effective_context_panel(axis: Axes, run: Run) -> None:
    finish(axis, "Effective context", "Σ length² / row (tokens)")
    context, window = run.curve("effective_context"), run.curve("window").finite()
    if not _raw_and_mean(axis, context, PURPLE, "effective context"):
        return
    if window.values.size:
        _plot(axis, window, GREEN, label="window", drawstyle="steps-post", linewidth=1.2, linestyle=":")
    axis.legend(loc="lower right")
    _token_scale(axis, [context.finite(), window])


def last_panel(axis: Axes, run: Run) -> None:
    by_length = run.validation_by_length()
    if not by_length:
        curve_panel(axis, run.curve("learning_rate"), SLATE, "Learning rate", "", smooth=False)
        return
    finish(axis, "Validation loss by evaluation length", "nats / token")
    colours = matplotlib.colormaps[LENGTH_COLOURS](np.linspace(*LENGTH_SHADES, len(by_length)))
    top = _clip_validation(axis, list(by_length.values()))
    for colour, (length, curve) in zip(colours, by_length.items(), strict=True):
        known = _below(curve, top)
        axis.plot(known.steps, known.values, "o-", color=colour, markersize=4, label=tokens_text(length))
    axis.legend(loc="upper right", title="tokens")


def curve_panel(
    axis: Axes,
    curve: Curve,
    colour: str,
    title: str,
    unit: str,
    *,
    log: bool = False,
    smooth: bool = True,
    from_zero: bool = False,
) -> None:
    finish(axis, title, unit)
    if not (_raw_and_mean(axis, curve, colour, None) if smooth else _raw(axis, curve, colour)):
        return
    known = curve.finite().values
    if log:
        _log_scale_if_wide(axis, known)
    if from_zero:
        axis.set_ylim(bottom=0.0)


def comparison_panel(axis: Axes, runs: Sequence[Run], key: str, title: str, unit: str) -> None:
    """Draw a metric, or the validation loss as `valid_loss`, of several runs: running means alone, to tell apart."""
    finish(axis, title, unit)
    curves = [run.validation() if key == "valid_loss" else run.curve(key) for run in runs]
    if key == "valid_loss":
        top = _clip_validation(axis, curves)
        curves = [_below(curve, top) for curve in curves]
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        if run.weighted or key not in WEIGHTING:
            _compared(axis, curve, key, RUN_COLOURS[index % len(RUN_COLOURS)], run.name)
    _scale_compared(axis, key, curves)


def _compared(axis: Axes, curve: Curve, key: str, colour: str, name: str) -> None:
    known = curve.finite()
    if key == "valid_loss":
        axis.plot(known.steps, known.values, "o-", color=colour, markersize=4, label=name)
    elif key == "window":
        _plot(axis, known, colour, label=name, drawstyle="steps-post")
    else:
        _plot(axis, Curve(known.steps, running_mean(known.values)), colour, label=name)


def _scale_compared(axis: Axes, key: str, curves: Sequence[Curve]) -> None:
    known = [curve.finite() for curve in curves]
    values = np.concatenate([curve.values for curve in known])
    if not values.size:
        _no_data(axis)
    elif key in ("window", "effective_context"):
        _token_scale(axis, known)
    elif key == "lm_loss":
        clip_training(axis, known, -np.inf)
    elif key == "tokens_per_s":
        axis.set_ylim(bottom=0.0)
    elif key in ("grad_norm", "weight_max"):
        _log_scale_if_wide(axis, values)


def _raw_and_mean(axis: Axes, curve: Curve, colour: str, label: str | None) -> bool:
    """Draw pale raw values under a strong running mean; False, with a remark in the panel, if there are none."""
    known = curve.finite()
    if known.values.size <= _FEW_POINTS:
        return _raw(axis, curve, colour, label)
    alpha = 0.25 if known.values.size > _MANY_POINTS else 0.5
    axis.plot(*_extremes(known), color=colour, alpha=alpha, linewidth=0.8)
    axis.plot(known.steps, running_mean(known.values), color=colour, label=label)
    return True


def _raw(axis: Axes, curve: Curve, colour: str, label: str | None = None) -> bool:
    known = curve.finite()
    if not known.values.size:
        _no_data(axis)
        return False
    _plot(axis, known, colour, label=label)
    return True


def _plot(axis: Axes, curve: Curve, colour: str, **line: object) -> None:
    if curve.values.size <= _FEW_POINTS:
        line = {"marker": "o", "markersize": 3.5} | line
    axis.plot(curve.steps, curve.values, color=colour, **line)  # type: ignore[arg-type]


def _extremes(curve: Curve) -> tuple[Column, Column]:
    """Return a curve's points; of a long one the lowest and highest of each of 500 spans, which looks the same."""
    if curve.values.size <= 2 * _MANY_POINTS:
        return curve.steps, curve.values
    spans = np.array_split(np.arange(curve.values.size), _MANY_POINTS // 2)
    kept = [sorted({span[curve.values[span].argmin()], span[curve.values[span].argmax()]}) for span in spans]
    index = np.concatenate(kept)
    return curve.steps[index], curve.values[index]


def running_mean(values: Column) -> Column:
    """Return the running mean [n] over about a fiftieth of the curve, centred.

    At the start, where curves are steep, the span shrinks evenly; at the end its right half runs out.
    """
    n = values.size
    index = np.arange(n)
    before = np.minimum(index, n // 100 + 1)
    after = np.minimum(before, n - 1 - index)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[index + after + 1] - sums[index - before]) / (before + after + 1)


def clip_training(axis: Axes, curves: Sequence[Curve], others: float = -np.inf) -> float:
    """End the axis above 97 % of each run's steps, as the first ones would squeeze all that matters flat.

    `others` is the highest value of other curves in the panel. Returns the end of the axis, or infinity.
    """
    known = [curve.finite().values for curve in curves]
    known = [values for values in known if values.size]
    if not known or min(values.size for values in known) < _CLIP_FROM:
        return np.inf
    top, bottom = max(np.quantile(values, 0.97) for values in known), min(values.min() for values in known)
    margin = 0.06 * (top - bottom)
    highest = max(others, *(values.max() for values in known))
    if highest <= top + margin or margin == 0.0:
        return np.inf
    axis.set_ylim(bottom - margin, top + margin)
    _remark(axis, f"highest {highest:.2f}, not shown")
    return float(top + margin)


def _clip_validation(axis: Axes, curves: Sequence[Curve]) -> float:
    """Leave each run's first evaluation off the axis if enough others follow; returns what to stay below."""
    known = [curve.finite().values for curve in curves]
    known = [values for values in known if values.size]
    if not known or min(values.size for values in known) < _CLIP_VALIDATION_FROM:
        return np.inf
    top, highest = max(values[1:].max() for values in known), _highest(curves)
    if highest <= top:
        return np.inf
    _remark(axis, f"highest {highest:.2f}, not shown")
    return float(top)


def _below(curve: Curve, top: float) -> Curve:
    known = curve.finite()
    shown = known.values <= top
    return Curve(known.steps[shown], known.values[shown])


def _highest(curves: Sequence[Curve]) -> float:
    return float(max((curve.finite().values.max(initial=-np.inf) for curve in curves), default=-np.inf))


def _remark(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="right", fontsize=9, color=GREY, fontweight="normal")


def _log_scale_if_wide(axis: Axes, values: Column) -> None:
    if values.min() <= 0 or values.max() < _LOG_FROM * values.min():
        return
    _log_scale(axis)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def _log_scale(axis: Axes, base: int = 10) -> None:
    """Make the axis logarithmic and have its label say so."""
    axis.set_yscale("log", base=base)
    axis.set_ylabel(", ".join(filter(None, [axis.get_ylabel(), "log scale"])))


def _token_scale(axis: Axes, curves: Sequence[Curve]) -> None:
    """Label token counts as 32, 8K, 0.5M; a logarithmic axis of powers of two where the range is wide."""
    values = np.concatenate([curve.values for curve in curves])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(value)))
    if values.min() <= 0 or values.max() < _LOG_FROM * values.min():
        axis.set_ylim(0.0, 1.08 * values.max())
        return
    low, high = int(np.floor(np.log2(values.min()))), int(np.ceil(np.log2(values.max())))
    stride = max(1, round((high - low) / 7))
    _log_scale(axis, base=2)
    axis.yaxis.set_major_locator(FixedLocator([2.0**power for power in range(low, high + 1, stride)]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(value)))


def tokens_text(count: float) -> str:
    """Write a number of tokens as 512, 8K, 0.5M."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if count >= size:
            return f"{count / size:g}{letter}" if count % (size // 8) == 0 else f"{count / size:.1f}{letter}"
    return f"{count:g}"


def short_number(value: float, _: object = None) -> str:
    """Write a number of thousands, millions and more with its letter; what is beyond, as 1e18."""
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:,g}"


def finish(axis: Axes, title: str, unit: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel(unit)
    axis.xaxis.set_major_formatter(FuncFormatter(short_number))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True))
    if unit == "tokens / s":
        axis.yaxis.set_major_formatter(FuncFormatter(short_number))
    axis.margins(x=0.02)
    if title == "Learning rate":
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))


def finish_small(axis: Axes, key: str) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10], integer=True))
    if key == "zero_share" and np.isfinite(axis.dataLim.ymax):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        top = max(0.05, axis.dataLim.ymax)
        axis.set_ylim(-0.03 * top, 1.06 * top)


def _no_data(axis: Axes) -> None:
    axis.text(0.5, 0.5, "no values in this run", transform=axis.transAxes, ha="center", va="center", color=GREY)
