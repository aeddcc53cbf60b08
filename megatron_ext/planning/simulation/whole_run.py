"""A configuration on a number of cards: steps at moments of its schedule, then the whole run with its failures."""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import mean

import numpy as np

from megatron_ext.arrays import Float64
from megatron_ext.config import Config
from megatron_ext.planning.simulation.cluster import Cluster
from megatron_ext.planning.simulation.failures import (
    Outcome,
    Saves,
    enough_draws,
    intervals_around,
    run_through,
    young,
)
from megatron_ext.planning.simulation.rows import DocumentEnds, row_costs
from megatron_ext.planning.simulation.step import (
    Losses,
    SimulatedStep,
    draw_cards,
    even_cards,
    losses,
    message_seconds,
    pass_seconds,
    simulate_step,
)
from megatron_ext.planning.step_time import Speeds, work_of


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Names what a run is simulated on.

    Attributes:
        gpus: how many cards.
        gpu: their name in `speeds`.
        speeds: what cards, links and programs reach.
        cluster: how cards differ and fail.
    """

    gpus: int
    gpu: str
    speeds: Speeds
    cluster: Cluster


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Holds a few steps in a row of a run.

    Attributes:
        step: the first of them, counted from 0.
        window: of that step.
        seconds: of each.
        losses: where the seconds go, on average.
        first: the first step in detail.
    """

    step: int
    window: int
    seconds: tuple[float, ...]
    losses: Losses
    first: SimulatedStep


def simulate_moments(
    config: Config,
    machine: Machine,
    vocab_size: int,
    ends_of: DocumentEnds,
    *,
    moments: int,
    repeats: int,
    most_rows: int,
) -> list[Moment]:
    """Simulate steps at evenly spaced moments of the run.

    Args:
        config: the run's; valid on so many cards.
        machine: what it runs on.
        vocab_size: token ids.
        ends_of: the document ends of a sample.
        moments: how many.
        repeats: steps in a row at each, at most up to the run's end.
        most_rows: of a global batch, see `row_costs`.
    """
    steps, seed = config.training.train_iters, config.training.seed
    found = []
    for number in range(moments):
        begin = int((number + 0.5) / moments * steps)
        window = min(config.window_schedule().window_at(begin), config.data.seq_length)
        work = work_of(config, machine.gpus, machine.gpu, vocab_size, window)
        message = message_seconds(work, machine.speeds, machine.cluster)
        simulated: list[SimulatedStep] = []
        lost: list[Losses] = []
        for step in range(begin, min(begin + repeats, steps)):
            rows = row_costs(config, machine.gpus, ends_of, step, window, most_rows)
            passes = pass_seconds(work, rows, machine.speeds)
            cards = draw_cards(work, machine.cluster, seed, step)
            simulated.append(simulate_step(work, passes, cards, message))
            lost.append(losses(work, passes, cards, message))
        found.append(
            Moment(
                step=begin,
                window=window,
                seconds=tuple(one.total for one in simulated),
                losses=Losses(*(mean(getattr(one, field.name) for one in lost) for field in fields(Losses))),
                first=simulated[0],
            )
        )
    return found


def even_step(config: Config, machine: Machine, vocab_size: int, window: int) -> SimulatedStep:
    """Simulate a step of rows that are one document each, on cards that are all equally fast."""
    whole = np.array([config.data.seq_length])
    rows = row_costs(config, machine.gpus, lambda _: whole, 0, window, most_rows=1)
    work = work_of(config, machine.gpus, machine.gpu, vocab_size, window)
    message = message_seconds(work, machine.speeds, machine.cluster)
    return simulate_step(work, pass_seconds(work, rows, machine.speeds), even_cards(work), message)


def step_seconds(config: Config, moments: list[Moment]) -> Float64:
    """Return float64 [steps], the seconds of every step of the run: one of those simulated nearest to it."""
    steps = config.training.train_iters
    chance = np.random.default_rng((config.training.seed, 2))
    nearest = np.arange(steps) * len(moments) // steps
    seconds = np.empty(steps)
    for number, moment in enumerate(moments):
        own = np.flatnonzero(nearest == number)
        seconds[own] = chance.choice(moment.seconds, len(own))
    return seconds


def save_seconds(config: Config, machine: Machine, vocab_size: int, *, asynchronous: bool) -> Saves:
    """Say what a checkpoint costs when all cards write their share of it at once."""
    work = work_of(config, machine.gpus, machine.gpu, vocab_size, config.data.seq_length)
    gigabytes = work.saved * machine.gpus / 1e9
    cluster = machine.cluster
    write = gigabytes / min(machine.gpus * cluster.save_card, cluster.save_all) + cluster.save_end
    if not asynchronous:
        return Saves(stall=cluster.save_begin + write, write=cluster.save_begin + write)
    stall = cluster.save_begin + gigabytes / machine.gpus / cluster.host_copy
    return Saves(stall=stall, write=stall + write)


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """Holds a run with its failures.

    Attributes:
        steps: float64 [n], seconds of each step.
        mtbf: seconds between two failures of the job, on average.
        saves: what checkpoints cost, by "synchronous" and "asynchronous".
        youngs: seconds of work between two saves, by Young's rule.
        intervals: what became of it by the interval between saves, in ascending order.
    """

    steps: Float64
    mtbf: float
    saves: dict[str, Saves]
    youngs: dict[str, float]
    intervals: dict[str, list[Outcome]]

    def best(self, kind: str) -> Outcome:
        """Return the interval with the most goodput."""
        return max(self.intervals[kind], key=lambda one: one.goodput)


def simulate_run(config: Config, machine: Machine, vocab_size: int, moments: list[Moment]) -> WholeRun:
    """Run all steps through, with checkpoints in intervals around Young's and in the run's own (`save_interval`)."""
    steps = step_seconds(config, moments)
    mtbf = machine.cluster.mtbf * 3600 / machine.gpus
    saves = {
        kind: save_seconds(config, machine, vocab_size, asynchronous=kind == "asynchronous")
        for kind in ("synchronous", "asynchronous")
    }
    youngs = {kind: young(save.stall, mtbf) for kind, save in saves.items()}
    intervals = {}
    for kind, save in saves.items():
        tried = set(intervals_around(youngs[kind] / float(steps.mean()), len(steps)))
        if 0 < config.checkpoint.save_interval <= len(steps):
            tried.add(config.checkpoint.save_interval)
        intervals[kind] = [
            run_through(
                steps,
                interval,
                save,
                mtbf=mtbf,
                restart=machine.cluster.restart,
                seed=config.training.seed,
                draws=enough_draws(float(steps.sum()), mtbf),
            )
            for interval in sorted(tried)
        ]
    return WholeRun(steps=steps, mtbf=mtbf, saves=saves, youngs=youngs, intervals=intervals)
