"""Read a run's checkpoint in one process without Megatron: which tensors it has, and their rows, block by block.

torch's DCP reads the same files (engine/restricted.py loads a run with it), but into tensors that exist already: every
stored block is read for each request that touches it, and then copied. A tensor of 256 MiB takes it 514 MiB and as
the 24 runs of rows that q, k and v of 8 groups are 23 s; here they take 260 MiB and 0.8 s, because the last block is
kept and handed out in views (benchmarks/conversion.py).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.checkpoint.formats.metadata import METADATA, StorageInfo, read_metadata
from megatron_ext.errors import UserError, first_line


@dataclass(frozen=True)
class Block:
    """Describes a stored part of a tensor: where in the tensor it begins, its sizes, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StorageInfo


@dataclass(frozen=True)
class StoredTensor:
    """Describes a tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]


class TorchDistTensors:
    """Reads the tensors of a checkpoint folder in torch's distributed format.

    Attributes:
        folder: of the checkpoint.
        tensors: by their names; layers are stacked along a first axis, the experts of each along a second.

    Raises:
        UserError: `.metadata` cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._kept: tuple[Block, Tensor] | None = None  # the last block: the next rows are often of the same
        metadata = read_metadata(folder)
        stored = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        try:
            for name, entry in metadata.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    blocks = tuple(
                        Block(tuple(chunk.offsets), tuple(chunk.sizes), stored[name, tuple(chunk.offsets)])
                        for chunk in entry.chunks
                    )
                    self.tensors[name] = StoredTensor(tuple(entry.size), entry.properties.dtype, blocks)
        except (KeyError, ValueError) as error:
            raise UserError(f"checkpoint: {folder / METADATA} cannot be used ({error!r}); give another") from None

    def rows(self, name: str, place: tuple[int, ...], first: int, last: int) -> Iterator[Tensor]:
        """Yield rows `first` to `last` (exclusive) of a tensor, top to bottom, in blocks of some rows.

        Of tensors that are stacked along leading axes, `place` says which one.

        At any time at most the rows that are asked for are in memory, or one stored block where that is larger.

            TP 1       TP 4, rows cut   TP 2, columns cut     a band is what the same blocks hold, side by side:
            +-----+    +-----+          +--+--+               one block each for the first two, both for the third
            |     |    +-----+          |  |  |
            |     |    +-----+          |  |  |
            +-----+    +-----+          +--+--+

        Raises:
            UserError: a file that is missing or damaged, or rows that no block holds.
        """
        axis = len(place)
        blocks = [block for block in self.tensors[name].blocks if _holds(block, place)]
        spans = [(block.offsets[axis], block.offsets[axis] + block.sizes[axis]) for block in blocks]
        edges = sorted({first, last} | {edge for span in spans for edge in span if first < edge < last})
        for low, high in pairwise(edges):
            band = [block for block, (top, bottom) in zip(blocks, spans, strict=True) if top <= low and high <= bottom]
            yield from self._band(name, band, place, low, high)

    def _band(self, name: str, band: Sequence[Block], place: tuple[int, ...], low: int, high: int) -> Iterator[Tensor]:
        """Yield rows that the same blocks hold, side by side."""
        shape = self.tensors[name].shape[len(place) :]
        columns = [block.sizes[-1] for block in band] if len(shape) > 1 else [1] * len(band)
        if sum(columns) != (shape[1] if len(shape) > 1 else 1):
            raise UserError(f"checkpoint: {self.folder} lacks part of {name}; give another checkpoint")
        if len(band) == 1:
            yield self._cut(band[0], place, low, high)
            return
        middle = (low + high + 1) // 2  # in halves: these rows and a block beside them are no more than all rows
        for top, bottom in ((low, middle), (middle, high)):
            if top < bottom:
                rows = torch.empty((bottom - top, *shape[1:]), dtype=self.tensors[name].dtype)
                for block in band:
                    left = block.offsets[-1]
                    rows[:, left : left + block.sizes[-1]] = self._cut(block, place, top, bottom)
                self._kept = None
                yield rows

    def _cut(self, block: Block, place: tuple[int, ...], low: int, high: int) -> Tensor:
        whole = self._load(block)
        for number, offset in zip(place, block.offsets, strict=False):
            whole = whole[number - offset]
        top = block.offsets[len(place)]
        return whole[low - top : high - top]

    def _load(self, block: Block) -> Tensor:
        if self._kept is not None and self._kept[0] == block:
            return self._kept[1]
        self._kept = None  # before the next one is read: two would be twice the memory
        path = self.folder / block.stored.relative_path
        try:
            with path.open("rb") as file:
                part = io.BufferedReader(_Part(file, block.stored.offset, block.stored.length))
                tensor = torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged record raises nearly anything, some of it without a word
            raise UserError(
                f"checkpoint: {path} is damaged or missing ({first_line(error)}); give another checkpoint"
            ) from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != block.sizes:
            raise UserError(f"checkpoint: {path} does not hold what .metadata says; give another checkpoint")
        self._kept = block, tensor.detach()
        return self._kept[1]


def _holds(block: Block, place: tuple[int, ...]) -> bool:
    """Tell whether a block has part of the tensor at a place of the leading axes."""
    spans = zip(place, block.offsets, block.sizes, strict=False)
    return all(offset <= number < offset + size for number, offset, size in spans)


class _Part(io.RawIOBase):
    """Shows a part of an open file as a file of its own, which torch.load seeks in."""

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
