"""Dropout under parallelism: which processes drop the same values, and which must not."""

import itertools
from pathlib import Path

import pytest
import torch

from megatron_ext.config import ParallelConfig
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.parallel import dropout_seed
from tests.conftest import SmallData, slow_but
from tests.launcher import call
from tests.parity.test_layouts import CP2, PP2, TP2_SP
from tests.runs import launch, relative

DROPOUT = "--hidden-dropout 0.3 --train-iters 3 --seq-length 64 --lr-warmup-iters 1 --window-rate 16"


def masks(rank: int, sizes: dict[str, int]) -> list[torch.Tensor]:
    """Dropout of this process on equal activations, and on those that tensor-parallel ranks share."""
    cpu = platform.choose("cpu")
    parallel.start(ParallelConfig(**sizes), 2, cpu, seed=7)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    everywhere = torch.nn.functional.dropout(torch.ones(256), 0.5)
    with get_cuda_rng_tracker().fork():
        shared = torch.nn.functional.dropout(torch.ones(256), 0.5)
    return [everywhere, shared]


@pytest.mark.parametrize("axis", ["data", "context", "pipeline_model", "tensor_model"])
def test_processes_with_other_tokens_or_layers_drop_other_values(axis: str) -> None:
    sizes = {} if axis == "data" else {f"{axis}_parallel_size": 2}
    (first, first_shared), (second, second_shared) = call(masks, 2, sizes)
    assert torch.equal(first, second) == (axis == "tensor_model")  # those hold the same activations
    assert not torch.equal(first_shared, second_shared)


@pytest.mark.parametrize(("processes", "layout"), slow_but([(1, "")], [(1, ""), (2, TP2_SP), (2, PP2), (2, CP2)]))
def test_recomputed_layers_drop_the_same(processes: int, layout: str, small_data: SmallData, tmp_path: Path) -> None:
    flags = [*small_data.flags, *DROPOUT.split(), *layout.split()]
    not_recomputed, recomputed, without_dropout = (
        launch([*flags, *more.split()], processes, tmp_path / name).series("lm_loss")
        for name, more in {"kept": "", "full": "--recompute-granularity full", "none": "--hidden-dropout 0"}.items()
    )
    assert relative(recomputed, not_recomputed) <= 1e-6
    assert relative(without_dropout, not_recomputed) > 1e-4  # it does drop


def test_every_rank_has_its_own_seed_below_megatrons_limit() -> None:
    seeds = [dropout_seed(seed, *place) for seed in (0, 2**64 - 1) for place in itertools.product(range(6), repeat=3)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 2**63 - 100_000
