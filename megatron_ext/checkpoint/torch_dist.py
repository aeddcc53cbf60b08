"""A run's checkpoint read by one process without Megatron: which tensors it has, and their rows, block by block."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.metadata import METADATA, read_metadata
from megatron_ext.errors import UserError


@dataclass(frozen=True)
class Block:
    """A stored part of a tensor: where in the tensor, and where in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]


class TorchDistTensors:
    """The tensors of a checkpoint folder in torch's distributed format.

    Attributes:
        folder: of the checkpoint.
        tensors: by their names; layers are stacked along a first axis.

    Raises:
        UserError: `.metadata` cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = read_metadata(folder)
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        try:
            self.tensors = {
                name: Stored(tuple(entry.size), entry.properties.dtype, _blocks(name, entry, places))
                for name, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
        except (KeyError, ValueError) as error:
            raise UserError(f"checkpoint: {folder / METADATA} cannot be used ({error!r}); give another") from None
        self._kept: tuple[Block, Tensor] | None = None

    def rows(self, name: str, layer: int | None, first: int, last: int) -> Iterator[Tensor]:
        """Rows `first` to `last` (exclusive) of a layer's tensor, top to bottom, in blocks of some rows.

        At any time at most the rows that are asked for are in memory, or one stored block where that is larger.

        Raises:
            UserError: a file that is missing or damaged, or rows that no block holds.
        """
        stored = self.tensors[name]
        blocks = [block for block in stored.blocks if layer is None or _has_layer(block, layer)]
        axis = 0 if layer is None else 1
        spans = [(block.offsets[axis], block.offsets[axis] + block.sizes[axis]) for block in blocks]
        edges = sorted({first, last} | {edge for span in spans for edge in span if first < edge < last})
        for low, high in pairwise(edges):
            held = [block for block, (a, b) in zip(blocks, spans, strict=True) if a <= low and high <= b]
            yield from self._band(name, held, layer, low, high)

    def _band(self, name: str, held: Sequence[Block], layer: int | None, low: int, high: int) -> Iterator[Tensor]:
        """Rows that the same blocks hold, side by side."""
        shape = self.tensors[name].shape[0 if layer is None else 1 :]
        columns = [block.sizes[-1] for block in held] if len(shape) > 1 else [1] * len(held)
        if sum(columns) != (shape[1] if len(shape) > 1 else 1):
            raise UserError(f"checkpoint: {self.folder} lacks part of {name}; give another checkpoint")
        if len(held) == 1:
            yield self._cut(held[0], layer, low, high)
            return
        middle = (low + high + 1) // 2  # in halves: these rows and a block beside them are no more than all rows
        for a, b in ((low, middle), (middle, high)):
            if a < b:
                rows = torch.empty((b - a, *shape[1:]), dtype=self.tensors[name].dtype)
                for block in held:
                    left = block.offsets[-1]
                    rows[:, left : left + block.sizes[-1]] = self._cut(block, layer, a, b)
                self._kept = None
                yield rows

    def _cut(self, block: Block, layer: int | None, low: int, high: int) -> Tensor:
        whole = self._load(block)
        if layer is not None:
            whole = whole[layer - block.offsets[0]]
        top = block.offsets[0 if layer is None else 1]
        return whole[low - top : high - top]

    def _load(self, block: Block) -> Tensor:
        if self._kept is not None and self._kept[0] == block:
            return self._kept[1]
        self._kept = None
        path = self.folder / block.file
        try:
            with path.open("rb") as file:
                part = io.BufferedReader(_Part(file, block.start, block.length))
                tensor = torch.load(part, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"checkpoint: {path} is damaged or missing ({reason}); give another checkpoint") from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != block.sizes:
            raise UserError(f"checkpoint: {path} does not hold what .metadata says; give another checkpoint")
        self._kept = block, tensor.detach()
        return self._kept[1]


def _blocks(name: str, entry: Any, places: dict[tuple[str, tuple[int, ...]], Any]) -> tuple[Block, ...]:
    found = []
    for chunk in entry.chunks:
        place = places[name, tuple(chunk.offsets)]
        found.append(Block(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length))
    return tuple(found)


def _has_layer(block: Block, layer: int) -> bool:
    return block.offsets[0] <= layer < block.offsets[0] + block.sizes[0]


class _Part(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view[:count])
        self._at += count
        return count
