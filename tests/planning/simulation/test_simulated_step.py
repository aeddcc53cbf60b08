"""A simulated step is the time model's own where all is even, and never faster where something is uneven."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.errors import UserError
from megatron_ext.planning.simulation.cluster import Cluster, read_cluster
from megatron_ext.planning.simulation.rows import RowCosts
from megatron_ext.planning.simulation.step import (
    draw_cards,
    even_cards,
    losses,
    pass_seconds,
    simulate_step,
)
from megatron_ext.planning.step_time import Shapes, Work, read_speeds, step_time

SPEEDS, CLUSTER = read_speeds(), read_cluster()
SHAPES = Shapes(layers=32, hidden=4096, ffn=14336, heads=32, groups=8, vocabulary=128256)
WORK = Work(shapes=SHAPES, gpu="H100", world=512, row=131_072, rows=128, tp=8, pp=4, cp=2)  # 8 replicas of 16


def rows_of(work: Work, spread: float = 0.0, exchanged: float = 0.2) -> RowCosts:
    shape = (int(work.microbatches), work.replicas, work.cp)
    noise = np.random.default_rng(1).uniform(-1, 1, shape)
    return RowCosts(work.row / 4 * (1 + spread * noise), np.full(shape, exchanged))


def total(work: Work, rows: RowCosts, cluster: Cluster | None = None, step: int = 0) -> float:
    passes = pass_seconds(work, rows, SPEEDS)
    cards = even_cards(work) if cluster is None else draw_cards(work, cluster, seed=0, step=step)
    return simulate_step(work, passes, cards, 0.0).total


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", [{"pp": 1, "world": 128}, {"pp": 1, "cp": 1, "world": 64}])
def test_one_stage_of_even_rows_takes_what_the_time_model_says(sizes: dict[str, int], recompute: bool) -> None:
    work = replace(WORK, recompute=recompute, **sizes)
    rows = rows_of(work)
    context = work.row / 4
    model = step_time(replace(work, context=context, segment=2 * context, exchanged=0.2), SPEEDS)
    assert model.bubble == 0
    assert total(work, rows) == pytest.approx(model.total, rel=1e-9)


def test_a_pipelines_step_is_near_the_time_models() -> None:
    """There every stage waits for the output layer in each micro-batch; here the last stage alone does."""
    context = WORK.row / 4
    model = step_time(replace(WORK, context=context, segment=2 * context, exchanged=0.2), SPEEDS).total
    assert 0.8 * model < total(WORK, rows_of(WORK)) <= model * (1 + 1e-9)


def test_chunks_shorten_the_bubble() -> None:
    assert total(replace(WORK, chunks=4), rows_of(WORK)) < total(WORK, rows_of(WORK))


def test_backward_takes_about_twice_forward() -> None:
    passes = pass_seconds(WORK, rows_of(WORK), SPEEDS)
    assert 2.0 < passes.backward.mean() / passes.forward.mean() < 2.6
    again = pass_seconds(replace(WORK, recompute=True), rows_of(WORK), SPEEDS)
    assert np.allclose(again.forward, passes.forward, rtol=0.02)
    assert 1.2 < again.backward.mean() / passes.backward.mean() < 1.6


def test_the_slowest_rank_sets_the_pace() -> None:
    rows = rows_of(WORK)
    slower = rows.context.copy()
    slower[:, 0, 1] *= 1.5  # one context-parallel rank of one replica
    everyone = rows.context.copy()
    everyone[:, 0] *= 1.5
    one = total(WORK, replace(rows, context=slower))
    assert one == pytest.approx(total(WORK, replace(rows, context=everyone)), rel=0.01)
    assert one > 1.2 * total(WORK, rows)


def test_time_never_falls_as_cards_differ_more() -> None:
    seconds = [
        np.mean([total(WORK, rows_of(WORK), replace(CLUSTER, jitter=jitter), step) for step in range(4)])
        for jitter in (0.0, 0.01, 0.02, 0.05, 0.1)
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.05 * seconds[0]
    shares = [total(WORK, rows_of(WORK), replace(CLUSTER, jitter=0.0, slow_share=share)) for share in (0, 0.02, 1)]
    assert shares == sorted(shares)
    even = total(WORK, rows_of(WORK))
    assert shares[0] == pytest.approx(even)
    assert 1.07 * even < shares[2] < 1.081 * even  # all are slow: what is computed takes slow_by times as long


def test_the_same_seed_draws_the_same_cards() -> None:
    first, again = (draw_cards(WORK, CLUSTER, seed=1, step=2).slowness for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, draw_cards(WORK, CLUSTER, seed=1, step=3).slowness)
    lasting = replace(CLUSTER, jitter=0.0)
    assert np.array_equal(*(draw_cards(WORK, lasting, seed=1, step=step).slowness for step in (2, 3)))


def test_losses_add_up_and_none_is_negative() -> None:
    rows = rows_of(WORK, spread=0.3)
    passes = pass_seconds(WORK, rows, SPEEDS)
    cards = draw_cards(WORK, CLUSTER, seed=0, step=0)
    lost = losses(WORK, passes, cards, CLUSTER.message)
    assert lost.total == pytest.approx(simulate_step(WORK, passes, cards, CLUSTER.message).total)
    assert min(vars(lost).values()) > 0
    alone = replace(WORK, pp=1, world=128, rows=8)  # one micro-batch on each replica
    nothing = losses(alone, pass_seconds(alone, rows_of(alone), SPEEDS), even_cards(alone), 0.0)
    assert nothing.bubble == nothing.rows == nothing.cards == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("slow_by: 0.9", "slow_by: Input should be greater than or equal to 1"), ("speed: 1", "speed: Unexpected")],
)
def test_a_wrong_file_is_one_line(tmp_path, text: str, message: str) -> None:
    name = text.split(":")[0]
    kept = [f"{key}: {value}" for key, value in vars(CLUSTER).items() if key != name and not key.startswith("_")]
    (tmp_path / "cluster.yaml").write_text("\n".join([*kept, text]))
    with pytest.raises(UserError, match=message):
        read_cluster(tmp_path / "cluster.yaml")
