"""The scales of fp8's delayed recipe in a checkpoint: written once, read under another layout, without a pickle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launcher import call
from torch import nn

from megatron_ext.checkpoint.tensors import Stored, write
from megatron_ext.config import Config, ParallelConfig, TrainingConfig
from megatron_ext.config.arguments import to_dict
from megatron_ext.engine import fp8_state, parallel, platform

LAYERS, HISTORY = 4, 3


class Scaling:
    """As Transformer Engine's DelayedScalingRecipeState has them."""

    def __init__(self, tensors: int) -> None:
        self.scale = torch.ones(tensors)
        self.amax_history = torch.zeros(HISTORY, tensors)


class Linear(nn.Module):
    """Transformer Engine's, as far as its scales go: none before the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.fp8_meta_tensors_initialized = False

    def init_fp8_meta_tensors(self, recipe: object) -> None:
        gemms = self.fp8_meta["num_gemms"]
        self.fp8_meta |= {"scaling_fwd": Scaling(3 * gemms), "scaling_bwd": Scaling(2 * gemms)}
        self.fp8_meta_tensors_initialized = True


class Layer(nn.Module):
    """One with two matrices, numbered over the whole model from 1."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.mlp = nn.ModuleDict({"linear_fc1": Linear(), "linear_fc2": Linear()})
        self.norm = nn.LayerNorm(3)


def chunk(first: int, layers: int) -> Any:
    built = nn.Module()
    built.decoder = nn.Module()
    built.decoder.layers = nn.ModuleList(Layer(first + number + 1) for number in range(layers))
    built.config = SimpleNamespace()  # type: ignore[assignment]
    return built


def value(layer: int, matrix: str, name: str) -> float:
    return 100 * layer + 10 * (matrix == "linear_fc2") + ["scale", "amax_history"].index(name)


def scales(some: Any) -> Any:
    for layer in some.decoder.layers:
        for matrix, module in layer.mlp.items():
            for direction in ("fwd", "bwd"):
                for name in ("scale", "amax_history"):
                    tensor = getattr(module.fp8_meta[f"scaling_{direction}"], name)
                    yield tensor, value(layer.layer_number, matrix, name) + (direction == "bwd") / 2


def joined(sizes: dict[str, int]) -> parallel.Ranks:
    return parallel.start(ParallelConfig(**sizes), LAYERS, platform.choose("cpu"), seed=1)


def written(rank: int, folder: Path, sizes: dict[str, int]) -> list[str]:
    """Write what these ranks hold; which tensors this one wrote."""
    ranks = joined(sizes)
    share = LAYERS // ranks.pipeline_size
    mine = chunk(ranks.pipeline * share, share)
    fp8_state.shards([mine], ranks)  # makes them
    for tensor, filling in scales(mine):
        tensor.fill_(filling)
    shards = fp8_state.shards([mine], ranks)
    write(folder, shards, lambda files: None, torch.distributed.group.WORLD)
    parallel.stop()
    return [shard.name for shard in shards if shard.writes]


def restored(rank: int, folder: Path, sizes: dict[str, int]) -> int:
    """Read into a model that has computed nothing yet; how many tensors are right."""
    ranks = joined(sizes)
    share = LAYERS // ranks.pipeline_size
    mine = chunk(ranks.pipeline * share, share)
    Stored(folder).fill(fp8_state.shards([mine], ranks))
    right = [bool((tensor == filling).all()) for tensor, filling in scales(mine)]
    parallel.stop()
    assert all(right)
    return len(right)


def test_another_layout_goes_on_with_the_same_scales(tmp_path: Path) -> None:
    keys = call(written, 4, tmp_path, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    flat = [key for mine in keys for key in mine]
    assert len(flat) == len(set(flat)) == LAYERS * 2 * 4  # of the equal ones one is written
    assert "fp8.layers.3.mlp.linear_fc2.amax_history_bwd" in flat
    assert call(restored, 2, tmp_path, {"context_parallel_size": 2}) == [LAYERS * 8] * 2


@pytest.mark.parametrize(
    ("saved", "now", "there"),
    [
        (("hybrid", "delayed"), ("hybrid", "delayed"), True),
        ((None, "delayed"), ("hybrid", "delayed"), False),  # it was no fp8 run
        (("hybrid", "tensorwise"), ("hybrid", "delayed"), False),
        (("hybrid", "delayed"), ("hybrid", "tensorwise"), False),  # nothing asks for it
    ],
)
def test_only_the_delayed_recipe_has_a_state(saved: tuple[Any, Any], now: tuple[Any, Any], *, there: bool) -> None:
    before, after = (Config(training=TrainingConfig(fp8_format=one, fp8_recipe=two)) for one, two in (saved, now))
    assert fp8_state.is_saved(to_dict(before), after) is there
