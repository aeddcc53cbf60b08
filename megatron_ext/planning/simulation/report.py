"""Writes what was simulated as lines: steps by window, where their seconds go, goodput by checkpoint interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from megatron_ext.config import Config
from megatron_ext.planning.simulation.failures import Outcome
from megatron_ext.planning.simulation.whole_run import Machine, Moment, WholeRun


def describe_moments(config: Config, moments: list[Moment], rows: str) -> Iterator[str]:
    """Yield a table of steps by moment; `rows` says what rows these are."""
    yield f"rows: {rows}; window: {config.window.window_schedule}"
    yield ""
    parts = list(asdict(moments[0].losses))
    yield f"{'step':>9} {'window':>9} {'s/step':>9} {'slowest':>9}" + "".join(f" {part:>10}" for part in parts)
    for moment in moments:
        shares = [getattr(moment.losses, part) / moment.losses.total for part in parts]
        yield (
            f"{moment.step:>9,} {moment.window:>9,} {np.mean(moment.seconds):9.3f} {max(moment.seconds):9.3f}"
            + "".join(f" {share:>10.1%}" for share in shares)
        )
    yield (
        "busy: computing, of the mean card; bubble: waiting in the pipeline; rows, cards: waiting for the slowest, "
        "because they differ"
    )


def describe_run(config: Config, machine: Machine, run: WholeRun) -> Iterator[str]:
    """Yield goodput by interval, for both ways to save."""
    hours = float(run.steps.sum()) / 3600
    yield f"{hours:,.1f} hours of steps; a failure every {_span(run.mtbf)} on {machine.gpus:,} cards, on average"
    if hours * 3600 < run.mtbf:
        yield f"{np.exp(-hours * 3600 / run.mtbf):.0%} of such runs see none"
    for kind, tried in run.intervals.items():
        save, best = run.saves[kind], run.best(kind)
        yield ""
        yield f"{kind} saves: {_span(save.stall)} of standstill, written after {_span(save.write)}"
        yield f"{'every':>9} {'that is':>9} {'goodput':>9} {'saving':>9} {'redone':>9} {'restarts':>9} {'hours':>10}"
        for one in tried:
            yield _interval(one, best, config)
        yield f"by Young's rule, sqrt(2 x save x time between failures): every {_span(run.youngs[kind])}"


def _interval(one: Outcome, best: Outcome, config: Config) -> str:
    if not one.goodput:
        return f"{one.interval:>9,} {_span(one.work):>9}  gets nowhere: a failure comes before each checkpoint"
    mark = "  best" if one is best else ""
    mark += "  this run's" if one.interval == config.checkpoint.save_interval else ""
    return (
        f"{one.interval:>9,} {_span(one.work):>9} {one.goodput:9.2%} {one.saving / one.seconds:9.2%} "
        f"{one.redone / one.seconds:9.2%} {one.restarting / one.seconds:9.2%} {one.seconds / 3600:10,.1f}{mark}"
    )


def _span(seconds: float) -> str:
    """Write seconds in the unit that suits them."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"
