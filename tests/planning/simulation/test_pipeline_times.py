"""The pipeline's order is Megatron's, its bubble the textbook's, and its times those of one event after the other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_ext.planning.simulation.pipeline import Pass, Pipeline, order_of, pipeline

SHAPES = [(1, 1, 3), (2, 1, 2), (3, 1, 4), (4, 1, 2), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 6)]


def equal_times(shape: Pipeline, forward: float, backward: float) -> np.ndarray:
    return np.where(shape.forward, forward, backward)[:, None] / shape.chunks


@pytest.mark.parametrize(("stages", "chunks", "micros"), SHAPES)
def test_the_order_of_passes_is_megatrons(stages: int, chunks: int, micros: int) -> None:
    for stage in range(stages):
        own = order_of(stage, stages, chunks, micros)
        table = [(micro, 0) for micro in range(micros)] if chunks == 1 else get_schedule_table(micros, chunks, stages)
        sizes = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)
        peer = SimpleNamespace(pp_group=sizes, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None)
        if stages > 1:
            total, _, warmup, rest = get_pp_rank_microbatches(micros, chunks, stages, p2p_communicator=peer)
            assert total == warmup + rest == len(own) // 2
            firsts = next((place for place, one in enumerate(own) if not one.forward), len(own))
            assert firsts == warmup + (rest > 0)
        assert [(one.micro, one.chunk) for one in own if one.forward] == table
        assert [(one.micro, chunks - 1 - one.chunk) for one in own if not one.forward] == table


def one_event_after_the_other(shape: Pipeline, seconds: np.ndarray, message: float) -> dict[tuple[int, Pass], float]:
    """Let each stage do its next pass as soon as what it needs is there, one replica, by looking again and again."""
    queues = [order_of(stage, shape.stages, shape.chunks, shape.micros) for stage in range(shape.stages)]
    number = {
        (int(s), Pass(bool(f), int(c), int(m))): n
        for n, (s, f, c, m) in enumerate(zip(shape.stage, shape.forward, shape.chunk, shape.micro, strict=True))
    }
    clock, done = [0.0] * shape.stages, {}
    layers = shape.stages * shape.chunks
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            one = queue[0]
            layer = one.chunk * shape.stages + stage  # of the model's parts, in order
            needs = None
            if one.forward and layer > 0:
                needs = ((layer - 1) % shape.stages, Pass(True, (layer - 1) // shape.stages, one.micro))
            elif not one.forward and layer < layers - 1:
                needs = ((layer + 1) % shape.stages, Pass(False, (layer + 1) // shape.stages, one.micro))
            elif not one.forward:
                needs = (stage, one._replace(forward=True))
            if needs is not None and needs not in done:
                continue
            ready = 0.0 if needs is None else done[needs] + (message if needs[0] != stage else 0.0)
            clock[stage] = max(clock[stage], ready) + seconds[number[stage, one], 0]
            done[stage, one] = clock[stage]
            queue.pop(0)
    return done


@pytest.mark.parametrize(("stages", "chunks", "micros"), SHAPES)
def test_times_are_those_of_one_event_after_the_other(stages: int, chunks: int, micros: int) -> None:
    shape = pipeline(stages, chunks, micros)
    seconds = np.random.default_rng(7).uniform(0.5, 2.0, (len(shape.stage), 2))
    ends = shape.ends(seconds, message=0.1)
    for replica in range(2):
        expected = one_event_after_the_other(shape, seconds[:, replica : replica + 1], 0.1)
        for n in range(len(shape.stage)):
            one = Pass(bool(shape.forward[n]), int(shape.chunk[n]), int(shape.micro[n]))
            assert ends[n, replica] == pytest.approx(expected[int(shape.stage[n]), one])
    assert shape.last_ends(ends).max() == ends.max()


@pytest.mark.parametrize("micros", [1, 5])
def test_one_stage_has_no_bubble(micros: int) -> None:
    shape = pipeline(1, 1, micros)
    seconds = np.random.default_rng(3).uniform(1, 2, (2 * micros, 3))
    assert shape.ends(seconds).max(axis=0) == pytest.approx(seconds.sum(axis=0))


@pytest.mark.parametrize(("stages", "micros"), [(2, 2), (4, 8), (8, 16), (8, 8)])
def test_equal_passes_have_the_textbooks_bubble(stages: int, micros: int) -> None:
    shape = pipeline(stages, 1, micros)
    busy = 3.0 * micros
    assert shape.ends(equal_times(shape, 1.0, 2.0)).max() / busy - 1 == pytest.approx((stages - 1) / micros)


@pytest.mark.parametrize(("stages", "chunks", "micros"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 2, 16)])
def test_chunks_divide_the_bubble(stages: int, chunks: int, micros: int) -> None:
    """Megatron-LM (arXiv 2104.04473), section 2.2.2: the bubble is (p - 1) / (m v) of the ideal time."""
    shape = pipeline(stages, chunks, micros)
    busy = 3.0 * micros
    bubble = shape.ends(equal_times(shape, 1.0, 2.0)).max() / busy - 1
    assert bubble == pytest.approx((stages - 1) / (micros * chunks))


def test_a_slower_pass_never_ends_the_step_earlier() -> None:
    shape = pipeline(4, 2, 8)
    seconds = equal_times(shape, 1.0, 2.0)
    plain = shape.ends(seconds).max()
    for n in range(len(shape.stage)):
        slower = seconds.copy()
        slower[n] *= 1.5
        assert shape.ends(slower).max() >= plain
