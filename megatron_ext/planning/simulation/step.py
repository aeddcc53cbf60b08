"""The seconds of one optimizer step of a run: its rows on its cards, each as fast as it is that moment.

rows -> seconds of each context-parallel rank and micro-batch (step_time's roofline, of its own segments)
     -> the slowest of the tensor x context ranks, which meet in each layer
     -> the pipeline's longest path on each replica
     -> each stage's gradients, once the slowest replica has come; then the optimizer
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_ext.arrays import Float64
from megatron_ext.planning.simulation.cluster import Cluster
from megatron_ext.planning.simulation.pipeline import Pipeline, pipeline
from megatron_ext.planning.simulation.rows import RowCosts
from megatron_ext.planning.step_time import Speeds, Work, forward_seconds, step_time


@dataclass(frozen=True, eq=False)
class PassSeconds:
    """Holds what passes take on cards of equal speed.

    Attributes:
        forward, backward: float64 [M, R, cp], of one pipeline stage's layers over a micro-batch.
        head_forward, head_backward: of the output layer, on the last stage.
        data: what of a stage's gradients and weights nothing hides; `optimizer`: the update.
    """

    forward: Float64
    backward: Float64
    head_forward: float
    head_backward: float
    data: float
    optimizer: float


def pass_seconds(work: Work, rows: RowCosts, speeds: Speeds) -> PassSeconds:
    """Time each rank's passes over its own segments.

    Args:
        work: the step; its context, segments, exchange and imbalance are replaced by those of `rows`.
        rows: what the micro-batches ask.
        speeds: of the cards.
    """
    known: dict[tuple[float, float], tuple[float, float]] = {}
    one = replace(work, rows=0, imbalance=1.0)  # a micro-batch on each replica

    def passes(context: float, exchanged: float) -> tuple[float, float]:
        """Split a micro-batch's seconds; a third of what shows of the exchange is forward, as in step_time."""
        if (context, exchanged) not in known:
            # n^2 / 2 keys and n / 2 tiles for a segment of n tokens: for all of them, one of twice the mean context
            own = replace(one, context=context, segment=2 * context, exchanged=exchanged)
            parts = step_time(own, speeds)
            whole = parts.products + parts.attention + parts.memory + parts.tensor + parts.context + parts.experts
            alone = forward_seconds(replace(own, exchanged=0.0), speeds) - parts.head / 3
            forward = alone + parts.context / 3
            known[context, exchanged] = forward, whole - forward
        return known[context, exchanged]

    flat = [passes(*pair) for pair in zip(rows.context.ravel().tolist(), rows.exchanged.ravel().tolist(), strict=True)]
    forward, backward = np.array(flat).T.reshape(2, *rows.context.shape)
    mean = float(rows.context.mean())
    typical = step_time(
        replace(work, context=mean, segment=2 * mean, exchanged=float(rows.exchanged.mean()), imbalance=1.0), speeds
    )
    head = typical.head / work.microbatches
    return PassSeconds(forward, backward, head / 3, head * 2 / 3, typical.data, typical.optimizer)


@dataclass(frozen=True, eq=False)
class Cards:
    """Holds how many times the seconds of an even card each one takes: float64 [P, R, cp], the slowest of its tp."""

    slowness: Float64


def draw_cards(work: Work, cluster: Cluster, seed: int, step: int) -> Cards:
    """Draw the cards' slowness in a step: those that are slow stay so, jitter is drawn anew."""
    shape = (work.pp, work.replicas, work.cp, work.tp)
    slow = np.random.default_rng((seed, 0)).random(shape) < cluster.slow_share
    noise = np.random.default_rng((seed, 1, step)).standard_normal(shape)
    slowness = np.exp(cluster.jitter * noise - cluster.jitter**2 / 2) * np.where(slow, cluster.slow_by, 1.0)
    return Cards(slowness.max(axis=3))


def even_cards(work: Work) -> Cards:
    """Return cards that are all equally fast."""
    return Cards(np.ones((work.pp, work.replicas, work.cp)))


def message_seconds(work: Work, speeds: Speeds, cluster: Cluster) -> float:
    """Time a micro-batch's hidden states, in bf16 and shared out over tensor-parallel ranks, to another stage."""
    gpu = speeds.gpu(work.gpu)
    link = (gpu.nvlink if work.world <= gpu.node else gpu.network) * 1e9 * speeds.links
    return cluster.message + 2 * work.shapes.hidden * work.micro * work.row / work.cp / work.tp / link


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """Holds a step's passes in time.

    Attributes:
        pipeline: the passes.
        seconds, ends: float64 [n, R], how long each pass takes on each replica, and when it ends.
        data, optimizer: seconds of the gradients' reduction that nothing hides, and of the update.
    """

    pipeline: Pipeline
    seconds: Float64
    ends: Float64
    data: float
    optimizer: float

    @cached_property
    def computed(self) -> float:
        """Seconds until the last replica's last pass has ended."""
        return float(self.ends.max())

    @property
    def total(self) -> float:
        """Seconds of the step: each stage reduces its gradients with the last of its replicas."""
        return float(self.pipeline.last_ends(self.ends).max(axis=1).max()) + self.data + self.optimizer


def simulate_step(work: Work, passes: PassSeconds, cards: Cards, message: float) -> SimulatedStep:
    """Run the pipeline of a step on every replica; `message`: seconds from stage to stage."""
    micros = passes.forward.shape[0]
    shape = pipeline(work.pp, work.chunks, micros)
    # [P, M, R]: the ranks of a stage meet in each layer, so that the slowest sets the pace
    slowest = {
        True: (passes.forward[None] * cards.slowness[:, None]).max(axis=3) / work.chunks,
        False: (passes.backward[None] * cards.slowness[:, None]).max(axis=3) / work.chunks,
    }
    seconds = np.where(
        shape.forward[:, None], slowest[True][shape.stage, shape.micro], slowest[False][shape.stage, shape.micro]
    )
    with_head = (shape.stage == work.pp - 1) & (shape.chunk == work.chunks - 1)
    head = np.where(shape.forward, passes.head_forward, passes.head_backward) * with_head
    seconds += head[:, None] * cards.slowness[shape.stage].max(axis=2)
    return SimulatedStep(shape, seconds, shape.ends(seconds, message), passes.data, passes.optimizer)


@dataclass(frozen=True)
class Losses:
    """Holds where the seconds of a step go; they add up to `total`.

    Attributes:
        busy: computing, of the mean card, were all equally fast and all rows alike.
        bubble: waiting in the pipeline even then, and for the stage with the output layer.
        rows: because rows differ: the wait for the rank, micro-batch and replica with the most attention.
        cards: because cards differ.
        gradients, optimizer: their reduction, the update.
    """

    busy: float
    bubble: float
    rows: float
    cards: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.busy + self.bubble + self.rows + self.cards + self.gradients + self.optimizer


def losses(work: Work, passes: PassSeconds, cards: Cards, message: float) -> Losses:
    """Say where the seconds of a step go, by taking away one cause after the other."""
    alike = replace(
        passes,
        forward=np.full_like(passes.forward, passes.forward.mean()),
        backward=np.full_like(passes.backward, passes.backward.mean()),
    )
    ideal = simulate_step(work, alike, even_cards(work), message)
    with_rows = simulate_step(work, passes, even_cards(work), message)
    real = simulate_step(work, passes, cards, message)
    busy = float(ideal.seconds.sum(axis=0).mean()) / work.pp
    return Losses(
        busy=busy,
        bubble=ideal.computed - busy,
        rows=with_rows.computed - ideal.computed,
        cards=real.computed - with_rows.computed,
        gradients=passes.data,
        optimizer=passes.optimizer,
    )
