"""Sweeps agree with a search of their own, and the memory over a step with the estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse_stages
from megatron_ext.planning import sweeps
from megatron_ext.planning.memory import stage_memory
from megatron_ext.planning.memory_trace import stage_traces
from megatron_ext.planning.search import search
from megatron_ext.planning.simulation.cluster import read_cluster
from megatron_ext.planning.simulation.whole_run import Machine, even_step
from megatron_ext.planning.step_time import read_speeds

ROOT = Path(__file__).resolve().parents[2]
SPEEDS = read_speeds()
VOCABULARY = 32000


@pytest.fixture(scope="module")
def config() -> Config:
    return parse_stages(["--config", str(ROOT / "examples/configs/skyladder/skyladder_1b_8k.yaml")])[0].config


def test_longer_rows_save_more(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "LENGTHS", (8192, 32_768, 131_072))
    points = sweeps.by_length(config, 64, "H100", VOCABULARY, SPEEDS)
    savings = [point.saving for point in points]
    assert savings == sorted(savings)
    assert 0.05 < savings[0] < savings[-1] < 0.5
    for point in points:
        assert point.layout is not None
        data = point.layout.config.data
        assert (data.seq_length, data.global_batch_size * data.seq_length) == (point.length, 128 * 8192)
        assert max(point.seconds) == pytest.approx(point.full)  # the schedule ends at the whole row
    first = list(sweeps.describe_lengths(points))[1].split()
    assert first[0] == "8,192"
    assert first[2:4] == [f"{points[0].full:.3f}", f"{savings[0]:.1%}"]


def test_the_cards_asked_for_give_the_searchs_own_hours(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "FACTORS", (1, 4))
    same, four = sweeps.by_gpus(config, 64, "H100", VOCABULARY, SPEEDS)
    hours = search(config, 64, "H100", VOCABULARY, SPEEDS, top=1).best[0].hours
    assert same.strong_hours == same.weak_hours == hours
    assert four.weak_hours == pytest.approx(hours / 4, rel=0.05)  # the same rows on each card
    assert four.weak_hours <= four.strong_hours < hours
    assert "256" in list(sweeps.describe_sizes([four], 3.0))[1]


def test_what_fits_nowhere_is_said(config: Config) -> None:
    point = sweeps.AtLength(length=8192, layout=None)
    assert "no layout fits" in list(sweeps.describe_lengths([point]))[1]
    size = sweeps.AtSize(gpus=3, strong=None, weak=None, strong_hours=0.0, weak_hours=0.0)
    assert list(sweeps.describe_sizes([size], 3.0))[1].split() == ["3", "-", "-"]


@pytest.mark.parametrize("chunk", [None, 11])
def test_the_highest_point_over_a_step_is_the_estimate(config: Config, chunk: int | None) -> None:
    layout = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": chunk}
    piped = replace(config, parallel=replace(config.parallel, **layout))
    if chunk:
        piped = replace(piped, model=replace(piped.model, num_layers=44))
    machine = Machine(gpus=16, gpu="H100", speeds=SPEEDS, cluster=read_cluster())
    step = even_step(piped, machine, VOCABULARY, 8192)
    traces = stage_traces(piped, 16, VOCABULARY, step, 0)
    assert list(traces) == ["stage 0", "stage 1"]
    for stage, (times, sizes) in enumerate(traces.values()):
        memory = stage_memory(piped, 16, VOCABULARY, stage)
        assert sizes.max() == pytest.approx(memory.total)
        assert sizes[0] == sizes[-1] == memory.static + memory.batches
        assert np.diff(times).min() > -1e-9  # but for rounding
        assert times[-1] == step.total
