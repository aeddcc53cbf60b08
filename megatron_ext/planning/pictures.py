"""Draws plans and simulations, and puts them on one page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, PercentFormatter

from megatron_ext.arrays import Float64
from megatron_ext.errors import UserError
from megatron_ext.pages.charts import Chart, draw
from megatron_ext.pages.colours import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SLATE
from megatron_ext.pages.page import write_page
from megatron_ext.planning.simulation.step import SimulatedStep
from megatron_ext.planning.simulation.whole_run import Moment, WholeRun
from megatron_ext.planning.sweeps import AtLength, AtSize

TEMPLATE = Path(__file__).parent / "pictures.html.jinja"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SLATE)
GIB = 2**30


def write_pictures(path: Path, title: str, text: Sequence[str], charts: Iterable[Chart]) -> None:
    """Write a page: its charts, and below them the lines that the terminal shows."""
    write_page(path, TEMPLATE, title=title, charts=list(charts), text="\n".join(text))


def lengths_charts(points: Sequence[AtLength]) -> list[Chart]:
    """Draw step time and saving against the row's length, and the step's time through the window's phases."""
    known = [point for point in points if point.layout is not None]
    lengths = [point.length for point in known]

    def times(axes: Axes) -> None:
        axes.plot(lengths, [point.full for point in known], "o--", color=SLATE, label="window of the whole row")
        axes.plot(lengths, [float(np.mean(point.seconds)) for point in known], "o-", color=BLUE, label="scheduled")
        for point in known:
            axes.annotate(
                f"-{point.saving:.0%}",
                (point.length, float(np.mean(point.seconds))),
                (4, -11),
                textcoords="offset points",
                fontsize=8,
            )
        _tokens_axis(axes, lengths)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.margins(x=0.1, y=0.15)
        axes.set_ylabel("seconds a step")
        axes.legend(loc="upper left")

    def phases(axes: Axes) -> None:
        for number, point in enumerate(known):
            shares = (np.arange(len(point.seconds)) + 0.5) / len(point.seconds)
            colour = COLOURS[number % len(COLOURS)]
            dash = "-" if number < len(COLOURS) else ":"
            axes.plot(shares, np.array(point.seconds) / point.full, dash, color=colour, label=_tokens(point.length))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("of the run")
        axes.set_ylabel("of a step at the full window")
        axes.legend(ncols=2, loc="lower right")

    own = "The same tokens in a step; each length in its own fastest layout."
    grown = "Windows grow with the row, as the run's schedule does."
    return [
        draw("Step time by the row's length", times, caption=own),
        draw("Step time through the window's phases", phases, caption=grown),
    ]


def sizes_chart(points: Sequence[AtSize], price: float) -> Chart:
    """Draw the cost of the run against the number of cards."""

    def paint(axes: Axes) -> None:
        for name, colour in (("strong", BLUE), ("weak", ORANGE)):
            own = [(one.gpus, getattr(one, f"{name}_hours")) for one in points if getattr(one, name) is not None]
            label = {"strong": "the run's batch", "weak": "a batch that grows with the cards"}[name]
            axes.plot([size for size, _ in own], [size * h * price for size, h in own], "o-", color=colour, label=label)
            for size, hours in own:
                offset, place = (8, "bottom") if name == "strong" else (-8, "top")
                axes.annotate(
                    f"{hours:,.3g} h",
                    (size, size * hours * price),
                    (0, offset),
                    va=place,
                    ha="center",
                    textcoords="offset points",
                    fontsize=8,
                )
        axes.set_xscale("log", base=2)
        sizes = [one.gpus for one in points]
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("cards")
        axes.set_ylabel("dollars")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
        axes.margins(x=0.12)
        axes.legend(loc="lower right")

    caption = "Strong scaling: the same batch. Weak scaling: as many rows for each card."
    return draw("Cost by the number of cards", paint, caption=caption)


def gantt_chart(step: SimulatedStep, replica: int, what: str) -> Chart:
    """Draw the passes of one step on one replica."""
    shape, ends, seconds = step.pipeline, step.ends[:, replica], step.seconds[:, replica]
    begins = ends - seconds

    def paint(axes: Axes) -> None:
        for forward, colour, label in ((True, BLUE, "forward"), (False, ORANGE, "backward")):
            own = np.flatnonzero(shape.forward == forward)
            boxes = [
                [(begins[n], y - 0.4), (ends[n], y - 0.4), (ends[n], y + 0.4), (begins[n], y + 0.4)]
                for n, y in zip(own, shape.stage[own], strict=True)
            ]
            shades = 1 - 0.55 * shape.chunk[own] / max(shape.chunks, 1)
            axes.add_collection(
                PolyCollection(boxes, facecolors=colour, edgecolors=INK, linewidths=0.3, alpha=shades, label=label)
            )
        last = float(step.ends.max())
        left = last
        for size, colour, label in ((step.data, RED, "gradients"), (step.optimizer, SLATE, "optimizer")):
            if size > 0.002 * last:
                axes.barh(range(shape.stages), size, left=left, height=0.8, color=colour, label=label)
            left += size
        if last > 1.002 * ends.max():
            axes.axvline(last, color=INK, linewidth=1.0, linestyle="--", label="the slowest replica ends")
        if len(ends) <= 96:
            for n in range(len(ends)):
                middle = (begins[n] + ends[n]) / 2
                axes.text(middle, shape.stage[n], str(shape.micro[n]), ha="center", va="center", fontsize=6)
        axes.set_xlim(0, step.total)
        axes.set_ylim(shape.stages - 0.4, -0.6)
        axes.yaxis.set_major_locator(FixedLocator(range(shape.stages)))
        axes.grid(False)
        axes.set_xlabel("seconds")
        axes.set_ylabel("pipeline stage")
        _legend_below(axes, 3)

    height = 1.6 + 0.28 * min(shape.stages, 16)
    return draw(
        "One step", paint, caption=f"{what}; numbers are micro-batches, paler passes later chunks.", height=height
    )


def memory_chart(traces: Mapping[str, tuple[Float64, Float64]], card: float) -> Chart:
    """Draw the memory of cards over a step, by their names; `card`: GiB that one has."""

    def paint(axes: Axes) -> None:
        for (name, (times, sizes)), colour in zip(traces.items(), COLOURS, strict=False):
            axes.plot(times, sizes / GIB, color=colour, linewidth=1.2, label=name)
        highest = max(float(sizes.max()) for _, sizes in traces.values()) / GIB
        if highest > card / 2:  # else the line would press the others to the ground
            axes.axhline(card, color=RED, linestyle="--", linewidth=1.0, label="the card")
            highest = max(highest, card)
        axes.set_ylim(0, 1.1 * highest)
        axes.set_xlabel("seconds")
        axes.set_ylabel("GiB")
        _legend_below(axes, 3)

    return draw(
        "Memory over the step", paint, caption=f"The estimate of --dry-run, pass by pass; the card has {card:.0f} GiB."
    )


def rehearsed_chart(path: Path, card: float) -> Chart:
    """Draw the memory at the peak of each rank and window that tools/rehearse.py has written with --json.

    Raises:
        UserError: the file is no such list.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        peaks = [
            (f"rank {one['rank']}\n{_tokens(step['window'])}", step["memory"]) for one in found for step in one["steps"]
        ]
        parts = [part for part in peaks[0][1] if any(memory[part] for _, memory in peaks)]
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"rehearsal: {path} is not what tools/rehearse.py writes with --json ({error!r})") from error

    def paint(axes: Axes) -> None:
        places, ground = np.arange(len(peaks)), np.zeros(len(peaks))
        for number, part in enumerate(parts):
            size = np.array([memory[part] for _, memory in peaks]) / GIB
            colour, strength = COLOURS[number % len(COLOURS)], 1.0 if number < len(COLOURS) else 0.5
            axes.bar(places, size, 0.7, bottom=ground, color=colour, alpha=strength, label=part)
            ground += size
        axes.set_xticks(places, [name for name, _ in peaks])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("GiB")
        _legend_below(axes, 3)

    return draw(
        "Memory at the peak",
        paint,
        caption=f"Rehearsed; window below the rank; the card has {card:.0f} GiB.",
        height=3.2,
    )


def moments_chart(moments: Sequence[Moment]) -> Chart:
    """Draw where the seconds of a step go, by moments of the run."""

    def paint(axes: Axes) -> None:
        places, ground = np.arange(len(moments)), np.zeros(len(moments))
        for part, colour in zip(asdict(moments[0].losses), COLOURS, strict=True):
            size = np.array([getattr(moment.losses, part) for moment in moments])
            axes.bar(places, size, 0.8, bottom=ground, color=colour, label=part)
            ground += size
        labels = [f"{_tokens(moment.window)}" for moment in moments]
        axes.set_xticks(places, labels, rotation=45 if len(moments) > 8 else 0)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, 1.05 * ground.max())
        axes.set_xlabel("window at that moment")
        axes.set_ylabel("seconds a step")
        _legend_below(axes, 3)

    return draw("Where a step's seconds go", paint, caption="At evenly spaced moments of the run.", height=3.2)


def goodput_chart(run: WholeRun) -> Chart:
    """Draw goodput against the interval between checkpoints."""

    def paint(axes: Axes) -> None:
        for (kind, tried), colour in zip(run.intervals.items(), (BLUE, ORANGE), strict=True):
            axes.plot([one.work / 60 for one in tried], [one.goodput for one in tried], "o-", color=colour, label=kind)
            young = run.youngs[kind] / 60
            axes.axvline(young, color=colour, linewidth=1.0, linestyle=":", label=f"Young's rule, {young:.3g} min")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("minutes of steps between checkpoints")
        axes.set_ylabel("goodput")
        _legend_below(axes, 2)

    return draw("Goodput by checkpoint interval", paint, caption="The share of the time that is progress.", height=3.2)


def _legend_below(axes: Axes, columns: int) -> None:
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.legend(loc="outside lower center", ncols=columns)


def _tokens_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(int(value))))
    axes.set_xlabel("tokens of a row")


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"
