"""When each forward and backward pass of a pipeline starts and ends: the longest path through a fixed graph.

A stage computes its passes in a fixed order, Megatron's, and each waits for the pass before it there and for what
another stage sends. Three stages, four micro-batches:

    stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1   .  F0 F1 F2 B0 .  B1 F3 B2 .  B3
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3                    B2 of stage 1 waits for B1 there, and for B2 of stage 2

The graph is the same for all data-parallel replicas, so one pass over it in numpy times all of them. That is why this
is no event simulation: for 8 stages x 16 micro-batches on 32 replicas simpy took 310 ms, this 0.8 ms, to the same end
(`python benchmarks/simulation.py engines`).

A message takes no time of either stage: who sends does not wait until it is received.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_ext.arrays import Bool, Float64, Int64


class Pass(NamedTuple):
    """Names one forward or backward pass of a model chunk over a micro-batch."""

    forward: bool
    chunk: int
    micro: int


def order_of(stage: int, stages: int, chunks: int, micros: int) -> list[Pass]:
    """List the passes of a stage in the order of Megatron's schedules: 1F1B, or interleaved where it has chunks.

    Interleaved, micro-batches go through a stage's chunks in groups of as many as there are stages.
    """
    if chunks == 1:
        forwards = [Pass(True, 0, micro) for micro in range(micros)]
        warmup = stages - stage - 1
    else:
        groups = [range(first, min(first + stages, micros)) for first in range(0, micros, stages)]
        forwards = [Pass(True, chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
        warmup = 2 * (stages - stage - 1) + (chunks - 1) * stages
    backwards = [Pass(False, chunks - 1 - one.chunk, one.micro) for one in forwards]
    warmup = min(warmup, len(forwards))
    steady = [one for pair in zip(forwards[warmup:], backwards, strict=False) for one in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Holds the passes of a step and what each waits for; `pipeline` makes it.

    Attributes:
        stages, chunks, micros: pipeline stages, model chunks of each, micro-batches of a replica.
        stage, chunk, micro: int64 [n], where and of what each of the n passes is; a stage's are in its order.
        forward: bool [n].
        before: int64 [n], the pass before it on its stage; n where there is none.
        source: int64 [n], the pass whose result it needs; n where there is none.
        sent: bool [n], whether that comes from another stage.
        levels: passes that wait for none of each other, one group after the other.
    """

    stages: int
    chunks: int
    micros: int
    stage: Int64
    chunk: Int64
    micro: Int64
    forward: Bool
    before: Int64
    source: Int64
    sent: Bool
    levels: tuple[Int64, ...]

    def ends(self, seconds: Float64, message: float = 0.0) -> Float64:
        """Return when each pass ends, in seconds from the step's beginning: float64 [n, R].

        Args:
            seconds: float64 [n, R], how long each pass takes on each of R replicas.
            message: seconds that a result takes to another stage.
        """
        count = len(self.stage)
        assert seconds.shape[0] == count, (seconds.shape, count)
        ends = np.zeros((count + 1, seconds.shape[1]))  # the last row is what the first passes wait for: nothing
        delay = np.where(self.sent, message, 0.0)[:, None]
        for level in self.levels:
            free, ready = ends[self.before[level]], ends[self.source[level]] + delay[level]
            ends[level] = np.maximum(free, ready) + seconds[level]
        return ends[:-1]

    def last_ends(self, ends: Float64) -> Float64:
        """Return when each stage has done its last pass: float64 [stages, R]."""
        per_stage = 2 * self.chunks * self.micros
        return ends[per_stage - 1 :: per_stage]


@cache
def pipeline(stages: int, chunks: int, micros: int) -> Pipeline:
    """Connect the passes of a step."""
    orders = [order_of(stage, stages, chunks, micros) for stage in range(stages)]
    number = {
        (stage, one): stage * len(orders[0]) + place
        for stage, own in enumerate(orders)
        for place, one in enumerate(own)
    }
    count = len(number)
    before, source = np.full(count, count), np.full(count, count)
    sent = np.zeros(count, dtype=bool)
    for stage, own in enumerate(orders):
        for earlier, later in pairwise(own):
            before[number[stage, later]] = number[stage, earlier]
        for one in own:
            giver = _giver(stage, one, stages, chunks)
            if giver is not None:
                source[number[stage, one]] = number[giver]
                sent[number[stage, one]] = giver[0] != stage
    flat = [(stage, one) for stage, own in enumerate(orders) for one in own]
    return Pipeline(
        stages=stages,
        chunks=chunks,
        micros=micros,
        stage=np.array([stage for stage, _ in flat]),
        chunk=np.array([one.chunk for _, one in flat]),
        micro=np.array([one.micro for _, one in flat]),
        forward=np.array([one.forward for _, one in flat]),
        before=before,
        source=source,
        sent=sent,
        levels=_levels(before, source),
    )


def _giver(stage: int, one: Pass, stages: int, chunks: int) -> tuple[int, Pass] | None:
    """Return the stage and the pass whose result a pass needs; None for the first chunk's forward pass."""
    last = stages - 1
    if one.forward:
        if stage > 0:
            return stage - 1, one
        return (last, one._replace(chunk=one.chunk - 1)) if one.chunk > 0 else None
    if stage < last:
        return stage + 1, one
    return (0, one._replace(chunk=one.chunk + 1)) if one.chunk < chunks - 1 else (stage, one._replace(forward=True))


def _levels(before: Int64, source: Int64) -> tuple[Int64, ...]:
    """Group passes by the most that come before them on any path."""
    count = len(before)
    depth = np.full(count + 1, -1)
    depth[:count] = 0
    while True:
        deeper = np.maximum(depth[before], depth[source]) + 1
        if np.array_equal(deeper, depth[:count]):
            break
        assert deeper.max() < count, "the passes wait for each other in a circle"
        depth[:count] = deeper
    by_depth = np.argsort(depth[:count], kind="stable")
    borders = np.flatnonzero(np.diff(depth[by_depth])) + 1
    return tuple(np.split(by_depth, borders))
