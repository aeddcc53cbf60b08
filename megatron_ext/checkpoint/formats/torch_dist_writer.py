"""Write a checkpoint of weights in torch's distributed format, block by block, in one process.

What Megatron-Core's `torch_dist` strategy reads: `.metadata` (which tensor's block is where), `__0_0.distcp` (the
blocks), `metadata.json` (the strategy's name) and `common.pt` (the step). Blocks are rows of one layer's tensor: torch
reads any of them into any layout. The files are written by torch's DCP; ours is the planner, which reads a block when
torch comes to write it, where torch's own takes tensors that are in memory.
"""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable
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
STRATEGY = "metadata.json"
_STRATEGY = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

ReadBlock = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Layer:
    """Describes one layer's tensor, or one expert's, or the only one, and how to read it.

    Attributes:
        name: in the checkpoint.
        shape: without the axes of layers and experts.
        place: its numbers on those axes; () for a tensor that has none.
        stack: the lengths of those axes.
        read: the rows from `first` to `last` (exclusive), as `read(first, last)`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[int, ...]
    stack: tuple[int, ...]
    read: ReadBlock


def write_checkpoint(folder: Path, layers: Iterable[Layer]) -> None:
    """Fill an empty folder; only its manifest is missing then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it runs without a process group
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        dcp.save({}, storage_writer=_Writer(folder), planner=_Planner(list(layers)), no_dist=True)
    write_labels(folder, step=0)


def write_labels(folder: Path, step: int) -> None:
    """Write what Megatron-Core's own tools look for beside the tensors: the step, and the strategy's name.

    Raises:
        OSError: with the file's name, which torch.save itself does not give.
    """
    common = io.BytesIO()
    torch.save({"iteration": step}, common)
    (folder / COMMON).write_bytes(common.getvalue())
    (folder / STRATEGY).write_text(json.dumps(_STRATEGY))


class _Writer(dcp.FileSystemWriter):
    """Leaves out where and when: the path is another one soon, and the same model gives the same files."""

    def storage_meta(self) -> StorageMeta:
        """Return neither path nor time."""
        return StorageMeta()


class _Planner(SavePlanner):
    """Cuts tensors into blocks of about `BLOCK_BYTES`, and reads each only when torch comes to write it."""

    def __init__(self, layers: list[Layer]) -> None:
        self._blocks: dict[MetadataIndex, tuple[Layer, int, int]] = {}
        for layer in layers:
            step = max(1, BLOCK_BYTES // (math.prod(layer.shape[1:]) * layer.dtype.itemsize))
            for first in range(0, layer.shape[0], step):
                offset = [first] + [0] * (len(layer.shape) - 1)
                index = MetadataIndex(layer.name, [*layer.place, *offset])
                self._blocks[index] = layer, first, min(first + step, layer.shape[0])

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: all is known already."""

    def create_local_plan(self) -> SavePlan:
        """Return an item for every block."""
        items = []
        for index, (layer, first, last) in self._blocks.items():
            sizes = (*(1 for _ in layer.place), last - first, *layer.shape[1:])
            assert index.offset is not None
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=index.offset, sizes=torch.Size(sizes)),
                properties=TensorProperties(dtype=layer.dtype),
                size=torch.Size((*layer.stack, *layer.shape)),
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the only process's plan, and `.metadata`."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Read a block's rows, now."""
        layer, first, last = self._blocks[write_item.index]
        block = layer.read(first, last)
        return block[(None,) * len(layer.place)]
