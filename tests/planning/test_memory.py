"""The memory formula against the bytes that real processes hold: benchmarks/memory.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launcher import Torchrun

from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.planning.memory import estimate, fullest_stage, layer_bytes, stage_memory, stage_parameters

SHAPE = "--hidden-size 256 --ffn-hidden-size 768 --num-layers 4 --num-attention-heads 8 --num-query-groups 2"
BATCH = "--seq-length 512 --global-batch-size 4"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"


def measured(flags: str, processes: int) -> list[dict[str, Any]]:
    """What each process found."""
    words = [*SHAPE.split(), *BATCH.split(), *flags.split()]
    done = Torchrun(processes).attempt("benchmarks/memory.py", *words)
    assert done.status == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == processes
    return found


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param("--bf16", 1, id="bf16"),
        pytest.param("", 1, id="fp32", marks=pytest.mark.slow),
        pytest.param("--bf16 --recompute-granularity full", 1, id="recompute", marks=pytest.mark.slow),
        pytest.param(
            "--recompute-granularity full --recompute-num-layers 2", 1, id="groups of 2", marks=pytest.mark.slow
        ),
        pytest.param("--bf16 --add-qkv-bias --no-untie-embeddings-and-output-weights", 1, id="bias, tied",
                     marks=pytest.mark.slow),
        pytest.param(f"--bf16 {TENSOR}", 2, id="tensor, sequence", marks=pytest.mark.slow),
        pytest.param("--tensor-model-parallel-size 2", 2, id="tensor", marks=pytest.mark.slow),
        pytest.param(f"--bf16 {PIPELINE}", 2, id="pipeline", marks=pytest.mark.slow),
        pytest.param(f"{PIPELINE} --no-untie-embeddings-and-output-weights", 2, id="tied", marks=pytest.mark.slow),
        pytest.param("--bf16 --use-distributed-optimizer", 2, id="distributed optimizer", marks=pytest.mark.slow),
        pytest.param("--use-distributed-optimizer", 2, id="distributed, fp32", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_formula_is_what_processes_hold(flags: str, processes: int) -> None:
    for found in measured(flags, processes):
        assert found["static"] == pytest.approx(found["static_estimate"], rel=0.01)
        if "layers" in found:
            assert found["layers"] == pytest.approx(found["layers_estimate"], rel=0.01)


def config(flags: str) -> Config:
    return parse(f"--vocab-size 1000 {SHAPE} {BATCH} {flags}".split())


def test_shares_add_up_to_the_model() -> None:
    """Over stages and tensor-parallel ranks, but for the norms that every rank holds and the padding."""
    whole = config("")
    one = stage_parameters(whole, 1024, 0)
    assert one == count_parameters(whole.model, 1024)
    assert stage_parameters(whole, 1000, 0) == one  # 1000 token ids are padded to 1024
    split = config(PIPELINE)
    assert sum(stage_parameters(split, 1024, stage) for stage in (0, 1)) == one
    norms = (2 * 4 + 1) * 256
    assert 2 * stage_parameters(config(TENSOR), 1024, 0) == one + norms
    tied = config(f"{PIPELINE} --no-untie-embeddings-and-output-weights")
    assert sum(stage_parameters(tied, 1024, stage) for stage in (0, 1)) == one  # the copy on the last stage


def test_the_fullest_stage_is_the_first_but_for_a_large_vocabulary() -> None:
    many = config(f"{PIPELINE} --bf16 --global-batch-size 64")
    first, last = (stage_memory(many, 2, 1000, stage) for stage in (0, 1))
    assert first.activations == 2 * last.activations
    assert (first.logits, last.logits > 0) == (0, True)
    assert estimate(many, 2, 1000) == max(first, last, key=lambda one: one.total)
    assert estimate(many, 2, 200_000).logits > 0
    assert fullest_stage(many, 2, 200_000) == 1
    assert (
        stage_memory(config(f"{PIPELINE} --global-batch-size 1"), 2, 1000, 0).activations
        == stage_memory(config(f"{PIPELINE} --global-batch-size 1"), 2, 1000, 1).activations
    )  # there is only one micro-batch to be in flight


def test_what_makes_it_smaller() -> None:
    plain = stage_memory(config("--bf16 --no-use-distributed-optimizer"), 4, 1000, 0)
    shared = stage_memory(config("--bf16 --use-distributed-optimizer"), 4, 1000, 0)
    assert shared.optimizer == -(-plain.optimizer // 4)
    assert stage_memory(config("--bf16"), 4, 1000, 0) == shared  # a GPU's default
    assert stage_memory(config("--bf16 --device cpu"), 4, 1000, 0) == plain
    full = stage_memory(config("--bf16 --recompute-granularity full"), 4, 1000, 0)
    assert full.activations < plain.activations / 3
    every = "--recompute-granularity full --recompute-method block --recompute-num-layers"
    none, all_ = (stage_memory(config(f"--bf16 {every} {n}"), 4, 1000, 0).activations for n in (1, 4))
    assert full.activations == all_ < none < plain.activations + layer_bytes(config("--bf16"), 512)
    interleaved = f"{PIPELINE} --bf16 --global-batch-size 64 --num-layers-per-virtual-pipeline-stage"
    chunks = stage_memory(config(f"{interleaved} 1"), 2, 1000, 0).activations
    assert chunks == 5 * layer_bytes(config("--bf16"), 512)  # 2 (p - 1) + (2 - 1) p + 1 chunks of a layer


def test_the_smallest_window_is_estimated_too() -> None:
    """Flash attention's scratch grows with the number of segments: a first window of 8 may need most."""
    flags = "--bf16 --seq-length 8192 --ffn-hidden-size 256 --vocab-size 128 --window-schedule linear"
    small, large = (config(f"{flags} --window-start {start} --window-end 8192") for start in (8, 4096))
    assert estimate(small, 1, 128) == stage_memory(small, 1, 128, 0, 8)
    assert estimate(small, 1, 128).layer > 3 * estimate(large, 1, 128).layer
    assert stage_memory(small, 1, 128, 0) == stage_memory(large, 1, 128, 0)  # the last window's
