"""A checkpoint of weights in torch's distributed format, written block by block by one process.

What Megatron-Core's `torch_dist` strategy reads: `.metadata` (which tensor's block is where), `__0_0.distcp` (the
blocks), `metadata.json` (the strategy's name) and `common.pt` (the step). Blocks are rows of one
layer's tensor: torch reads any of them into any layout.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron_ext.checkpoint.formats.metadata import COMMON

BLOCK_BYTES = 2**23
_STRATEGY = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

ReadBlock = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer's tensor, or the only one.

    Attributes:
        name: in the checkpoint.
        shape: without the axis of layers.
        place: (layer, number of layers); None: the tensor has no axis of layers.
        read: the rows from `first` to `last` (exclusive), as `read(first, last)`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[int, int] | None
    read: ReadBlock


def write_checkpoint(folder: Path, layers: Iterable[Layer]) -> None:
    """Fill an empty folder; only its manifest is missing then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it runs without a process group
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        dcp.save({}, storage_writer=_Writer(folder), planner=_Planner(list(layers)), no_dist=True)
    torch.save({"iteration": 0}, folder / COMMON)
    (folder / "metadata.json").write_text(json.dumps(_STRATEGY))


class _Writer(dcp.FileSystemWriter):
    """Leaves out where and when: the path is another one soon, and the same model gives the same files."""

    def storage_meta(self) -> StorageMeta:
        """Nothing."""
        return StorageMeta()


class _Planner(SavePlanner):
    """Cuts tensors into blocks, and reads each only when torch comes to write it."""

    def __init__(self, layers: list[Layer]) -> None:
        self._blocks = {(_index(layer, first)): (layer, first, last) for layer in layers for first, last in _cut(layer)}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """All is known already."""

    def create_local_plan(self) -> SavePlan:
        """Every block."""
        return SavePlan([_item(index, *block) for index, block in self._blocks.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The same, and `.metadata`."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The same."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A block's rows, now."""
        layer, first, last = self._blocks[write_item.index]
        block = layer.read(first, last)
        return block[None] if layer.place else block


def _cut(layer: Layer) -> Iterator[tuple[int, int]]:
    rows = layer.shape[0]
    step = max(1, BLOCK_BYTES // (math.prod(layer.shape[1:]) * layer.dtype.itemsize))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _index(layer: Layer, first: int) -> MetadataIndex:
    row = [first] + [0] * (len(layer.shape) - 1)
    return MetadataIndex(layer.name, [layer.place[0], *row] if layer.place else row)


def _item(index: MetadataIndex, layer: Layer, first: int, last: int) -> WriteItem:
    block = (last - first, *layer.shape[1:])
    sizes, whole = ((1, *block), (layer.place[1], *layer.shape)) if layer.place else (block, layer.shape)
    assert index.offset is not None
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=index.offset, sizes=torch.Size(sizes)),
        properties=TensorProperties(dtype=layer.dtype),
        size=torch.Size(whole),
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
