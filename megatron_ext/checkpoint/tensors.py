"""Write and read a checkpoint's tensors: one safetensors file for each process, and an index.

    tensors_<rank>.safetensors   the shards of one process
    tensors.json                 shape and dtype of every tensor, and the location of each of its shards

safetensors' own writer needs all tensors of a file in host memory; here one shard is there at a time, and the checksum
is computed on the way. torch's distributed checkpoint is not used, because its index is a pickle.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from megatron_ext import heartbeat
from megatron_ext.checkpoint.manifest import FileFacts, check_inside, facts_of, readable
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

INDEX = "tensors.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
Sizes = tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that this process holds."""

    name: str  # name of the tensor in the checkpoint
    shape: Sizes  # shape of the whole tensor
    offset: Sizes  # first index of the part on each axis
    # sizes, dtype: shape and dtype of the part
    sizes: Sizes
    dtype: torch.dtype
    data: Callable[[], Tensor]  # returns the part; for reading, this must be memory of the model or the optimizer
    writes: bool = True  # whether this process writes the part; among equal copies on several processes one does

    @classmethod
    def of(cls, name: str, tensor: Tensor, shape: Sizes, offset: Sizes, *, writes: bool = True) -> "Shard":
        """Return the shard of a tensor that is in memory."""
        tensor = tensor.detach()
        return cls(name, shape, offset, tuple(tensor.shape), tensor.dtype, lambda: tensor, writes)


@dataclass(frozen=True)
class Block:
    """A stored part of a tensor: its offset in the tensor, its sizes, and its first byte in a file."""

    offset: Sizes
    sizes: Sizes
    file: str
    first: NonNegativeInt


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; the dtype is a safetensors name."""

    shape: Sizes
    dtype: Literal["F64", "F32", "F16", "BF16", "U8"]
    blocks: tuple[Block, ...]

    @property
    def is_whole(self) -> bool:
        return sum(math.prod(block.sizes) for block in self.blocks) == math.prod(self.shape)


@dataclass(frozen=True)
class Written:
    """What one process has written: its file, and the tensors of which it has a block, by name."""

    file: str
    facts: FileFacts
    tensors: list[tuple[str, StoredTensor]]


_INDEX_FILE = TypeAdapter(dict[str, StoredTensor])


def write(folder: Path, rank: int, shards: Iterable[Shard]) -> Written:
    """Write a process's shards into its file, and flush it to disk."""
    shards = sorted(shards, key=lambda shard: -shard.dtype.itemsize)  # so that all are aligned
    words: dict[torch.dtype, Any] = {dtype: word for word, dtype in DTYPES.items()}
    places = list(accumulate((math.prod(shard.sizes) * shard.dtype.itemsize for shard in shards), initial=0))
    entries = {}
    for shard, span in zip(shards, pairwise(places), strict=True):
        key = shard.name
        if shard.sizes != shard.shape:
            key += str(list(shard.offset))
        entries[key] = {"dtype": words[shard.dtype], "shape": shard.sizes, "data_offsets": span}
    assert len(entries) == len(shards)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text

    path = folder / f"tensors_{rank:05d}.safetensors"
    digest = hashlib.sha256(header)
    tensors = []
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.write(header)
        for shard in shards:
            heartbeat.beat()
            block = Block(shard.offset, shard.sizes, path.name, file.tell())
            tensors.append((shard.name, StoredTensor(shard.shape, words[shard.dtype], (block,))))
            content = _bytes_of(shard.data().cpu())
            file.write(content)
            digest.update(content)
            del content  # before the next one is made
        assert file.tell() == len(header) + places[-1]
    return Written(path.name, FileFacts(len(header) + places[-1], digest.hexdigest()), tensors)


def write_index(folder: Path, parts: Iterable[Written]) -> dict[str, FileFacts]:
    """Write the index of what all processes have written; return the size and checksum of every file."""
    files: dict[str, FileFacts] = {}
    blocks: dict[str, list[Block]] = defaultdict(list)
    described: dict[str, StoredTensor] = {}
    for part in parts:
        files[part.file] = part.facts
        for name, tensor in part.tensors:
            blocks[name] += tensor.blocks
            described[name] = tensor
    tensors = {name: replace(tensor, blocks=tuple(blocks[name])) for name, tensor in described.items()}
    assert all(tensor.is_whole for tensor in tensors.values())
    with atomic_write(folder / INDEX) as partial:
        partial.write_bytes(_INDEX_FILE.dump_json(tensors))
    return files | {INDEX: facts_of(folder / INDEX)}


def _bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a tensor on the host, uint8 [bytes] in numpy."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


class Stored:
    """Reads the tensors of a checkpoint folder.

    Attributes:
        folder: the checkpoint folder.
        tensors: its tensors by name.

    Raises:
        UserError: the index is damaged, or names files elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
        try:
            with readable(path):
                self.tensors = _INDEX_FILE.validate_json(path.read_bytes())
        except ValidationError as error:
            raise UserError(f"load: {path} is damaged ({error.errors()[0]['msg']}); take another checkpoint") from None
        for name, tensor in self.tensors.items():
            if not tensor.is_whole:
                raise UserError(f"load: {path} lacks part of {name}; take another checkpoint")
        for name in {block.file for tensor in self.tensors.values() for block in tensor.blocks}:
            check_inside(name, path, "load")

    def read(self, name: str) -> Tensor:
        """Read a whole tensor.

        Raises:
            UserError: its file is damaged.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self.fill([Shard.of(name, whole, stored.shape, (0,) * whole.dim())])
        return whole

    @torch.no_grad()
    def fill(self, shards: Iterable[Shard], *, padded: bool = False) -> None:
        """Read the data of every shard into its memory, independent of the layout that wrote the tensors.

        Args:
            shards: the shards to read, with or without `writes`; the shards of one tensor follow one another.
            padded: allow another number of rows, due to vocabulary padding; rows that are not stored stay unchanged.

        Raises:
            UserError: a tensor is missing, has another shape or is damaged; the message names the tensor or the file.
        """
        for name, group in groupby(shards, lambda shard: shard.name):
            stored = self.tensors.get(name)
            if stored is None:
                raise UserError(f"load: {self.folder} has no tensor {name}; take another checkpoint")
            parts = list(group)
            shape = parts[0].shape
            if shape[padded:] != stored.shape[padded:]:
                raise UserError(
                    f"{name}: got {shape}, {self.folder} needs {stored.shape}; use its config.yaml and its tokenizer"
                )
            for block in stored.blocks:
                pairs = [(shard, _overlap(shard, block)) for shard in parts]
                overlaps = [(shard, overlap) for shard, overlap in pairs if overlap is not None]
                if not overlaps:
                    continue
                tensor = self._load(block, DTYPES[stored.dtype])
                for shard, (in_shard, in_block) in overlaps:
                    shard.data()[in_shard].copy_(tensor[in_block])

    def _load(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Read a block, with plain reads: a file that is mapped to memory would raise SIGBUS if its disk failed."""
        path = self.folder / block.file
        tensor = torch.empty(block.sizes, dtype=dtype)
        heartbeat.beat()
        with readable(path), path.open("rb") as file:
            file.seek(block.first)
            count = file.readinto(_bytes_of(tensor))
        if count < tensor.nbytes:
            raise UserError(f"load: {path} does not hold what {INDEX} says; take another checkpoint")
        return tensor


def _overlap(shard: Shard, block: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the indices, in each of two parts of a tensor, of what both have; None if they have nothing in common."""
    axes = zip(shard.offset, shard.sizes, block.offset, block.sizes, strict=True)
    spans = [(a, b, max(a, b), min(a + size, b + its)) for a, size, b, its in axes]
    if any(begin >= end for *_, begin, end in spans):
        return None
    in_shard = tuple(slice(begin - a, end - a) for a, _, begin, end in spans)
    return in_shard, tuple(slice(begin - b, end - b) for _, b, begin, end in spans)
