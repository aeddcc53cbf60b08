"""Write and read a checkpoint's tensors in torch's distributed format, with one record for each shard of a tensor.

    .metadata             the location of each part of each tensor: a pickle, read here without calling anything it
    names
    __<rank>_0.distcp     the records of one process, each in the format of torch.save

Writing uses torch's planner and writer. Reading is our own: torch's reader loads a record again for every request that
overlaps it, which takes 5 s instead of 0.3 s for 24 row ranges of one 320 MB tensor; here a record is loaded once and
sliced.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_ext import heartbeat
from megatron_ext.checkpoint.manifest import FileFacts, check_inside, is_transient
from megatron_ext.errors import UserError, first_line

METADATA = ".metadata"
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that this process holds.

    Attributes:
        name: name of the tensor in the checkpoint.
        shape: shape of the whole tensor.
        offset: first index of the part on each axis.
        sizes, dtype: shape and dtype of the part.
        data: returns the part; for reading, this must be memory of the model or the optimizer.
        writes: whether this process writes the part; among equal copies on several processes one does.
        made: whether `data` returns a new tensor, whose memory can be freed after writing.
    """

    name: str
    shape: Sizes
    offset: Sizes
    sizes: Sizes
    dtype: torch.dtype
    data: Callable[[], Tensor]
    writes: bool = True
    made: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor, shape: Sizes, offset: Sizes, *, writes: bool = True) -> Shard:
        """Return the shard of a tensor that is in memory."""
        tensor = tensor.detach()
        return cls(name, shape, offset, tuple(tensor.shape), tensor.dtype, lambda: tensor, writes)


@dataclass(frozen=True)
class Block:
    """A stored part of a tensor: its offset in the tensor, its sizes, and its byte range in a file."""

    offset: Sizes
    sizes: Sizes
    file: str
    first: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: Sizes
    dtype: torch.dtype
    blocks: tuple[Block, ...]


def write(
    folder: Path,
    shards: Iterable[Shard],
    complete: Callable[[dict[str, FileFacts]], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write all processes' shards into a folder, and flush the files to disk. Collective.

    Args:
        folder: an existing, empty folder.
        shards: this process's shards; those with `writes` are written.
        complete: called on process 0 after all have written, with the size and checksum of every file. If it fails, all
            processes fail.
        group: all processes, for CPU tensors. None: a single process.

    Raises:
        CheckpointException: a process failed; its `failures` name the process and the reason. It is not a subclass of
            Exception.
    """
    planner, writer = _Planner([shard for shard in shards if shard.writes]), _Writer(folder, complete)
    with warnings.catch_warnings() if group is None else _nothing():
        if group is None:
            warnings.simplefilter("ignore")  # torch warns if it runs without a process group
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Planner(SavePlanner):
    """Plans one record for each shard; the shard's tensor is requested when the record is written."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = {MetadataIndex(shard.name, shard.offset): shard for shard in shards}
        self._written: Tensor | None = None
        assert len(self._shards) == len(shards)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing; the shards are passed to the constructor."""

    def create_local_plan(self) -> SavePlan:
        """Return an item for every shard."""
        items = []
        for index, shard in self._shards.items():
            chunk = ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=shard.dtype), torch.Size(shard.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans unchanged, and `.metadata` without the locations of the records."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of an item on the host, and free the memory of the previous one.

        torch's writer calls this for one item at a time, but keeps all tensors until the file is complete.
        """
        heartbeat.beat()
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        shard = self._shards[write_item.index]
        tensor = shard.data()
        host = tensor.cpu()
        if host.untyped_storage().nbytes() != host.nbytes:  # torch.save writes the whole storage of a view
            host = host.clone()
        self._written = host if shard.made or host.data_ptr() != tensor.data_ptr() else None
        return host


class _Writer(dcp.FileSystemWriter):
    """Writes like torch, computes checksums while writing, and completes the folder on process 0."""

    def __init__(self, folder: Path, complete: Callable[[dict[str, FileFacts]], None]) -> None:
        # copying ahead uses CUDA streams, which in a thread belong to the first GPU
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = self._files = _HashingFiles()
        self._complete = complete

    def storage_meta(self) -> StorageMeta:
        """Return neither path nor time, as the folder is renamed and equal models should give equal files."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file; its checksum is sent to process 0 with the results."""
        results: list[Any] = [*super().write_data(plan, planner).wait(), self._files.facts] if plan.items else []
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write `.metadata`, and complete the folder."""
        files = {name: facts for part in results if part for name, facts in part.pop().items()}
        super().finish(metadata, results)
        files[METADATA] = self._files.facts[f"{METADATA}.tmp"]  # its name while torch writes it
        self._complete(files)


class _HashingFiles(FileSystem):
    """Opens files and records their size and checksum when they are closed."""

    def __init__(self) -> None:
        self.facts: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file for writing.

        Raises:
            OSError: with the file's name, which torch's record writer omits.
        """
        try:
            with _HashedFile(io.FileIO(path, mode), 2**20) as file:
                yield file
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        self.facts[Path(path).name] = FileFacts(file.size, file.digest.hexdigest())


class _HashedFile(io.BufferedWriter):
    def __init__(self, raw: io.FileIO, buffer_size: int) -> None:
        super().__init__(raw, buffer_size)
        self.size, self.digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.digest.update(data)
        self.size += written
        return written


class Stored:
    """Reads the tensors of a checkpoint folder.

    Attributes:
        folder: the checkpoint folder.
        tensors: its tensors by name.

    Raises:
        UserError: `.metadata` is damaged, or names anything but tensors and their files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors = folder, read_metadata(folder)

    def read(self, name: str) -> Tensor:
        """Read a whole tensor.

        Raises:
            UserError: it is missing or damaged.
        """
        stored = self.tensors.get(name)
        if stored is not None and len(stored.blocks) == 1 and stored.blocks[0].sizes == stored.shape:
            return self._load(stored.blocks[0])
        shape, dtype = ((0,), torch.float32) if stored is None else (stored.shape, stored.dtype)
        whole = torch.empty(shape, dtype=dtype)
        self.fill([Shard.of(name, whole, shape, (0,) * len(shape))])
        return whole

    @torch.no_grad()
    def fill(self, shards: Iterable[Shard], *, padded: bool = False) -> None:
        """Read the data of every shard into its memory, independent of the layout that wrote the tensors.

        Args:
            shards: the shards to read, with or without `writes`.
            padded: allow another number of rows, due to vocabulary padding; rows that are not stored stay unchanged.

        Raises:
            UserError: a tensor is missing, has another shape or is damaged; the message names the tensor or the file.
        """
        by_name: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            by_name[shard.name].append(shard)
        for name, mine in by_name.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise UserError(f"load: {self.folder} has no tensor {name}; take another checkpoint")
            shape = mine[0].shape
            if shape[padded:] != stored.shape[padded:]:
                raise UserError(
                    f"{name}: got {shape}, {self.folder} needs {stored.shape}; use its config.yaml and its tokenizer"
                )
            lacking = [_count(_overlap(shard.offset, shard.sizes, (0,) * len(shape), stored.shape)) for shard in mine]
            for block in stored.blocks:
                overlaps = [_overlap(shard.offset, shard.sizes, block.offset, block.sizes) for shard in mine]
                if not any(map(_count, overlaps)):
                    continue
                tensor = self._load(block)
                for number, (shard, (begin, end)) in enumerate(zip(mine, overlaps, strict=True)):
                    if count := _count((begin, end)):
                        part = shard.data()[_slices(begin, end, shard.offset)]
                        part.copy_(tensor[_slices(begin, end, block.offset)])
                        lacking[number] -= count
            if any(lacking):
                raise UserError(f"load: {self.folder} lacks part of {name}; take another checkpoint")

    def _load(self, block: Block) -> Tensor:
        path = self.folder / block.file
        heartbeat.beat()
        try:
            with path.open("rb") as file:
                file.seek(block.first)
                record = io.BytesIO(file.read(block.length))
            tensor = torch.load(record, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged record can raise almost any exception
            if is_transient(error):
                raise
            raise UserError(
                f"load: {path} cannot be read ({first_line(error)[:80]}); take another checkpoint"
            ) from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != block.sizes:
            raise UserError(f"load: {path} does not hold what {METADATA} says; take another checkpoint")
        return tensor.detach()


def _overlap(a: Sizes, a_sizes: Sizes, b: Sizes, b_sizes: Sizes) -> tuple[Sizes, Sizes]:
    """Return the begin and the end of the overlap of two parts of a tensor, on each axis."""
    begin = tuple(map(max, a, b))
    ends = zip(a, a_sizes, b, b_sizes, strict=True)
    return begin, tuple(min(at + size, other + its) for at, size, other, its in ends)


def _count(span: tuple[Sizes, Sizes]) -> int:
    return math.prod(max(end - begin, 0) for begin, end in zip(*span, strict=True))


def _slices(begin: Sizes, end: Sizes, offset: Sizes) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for a, b, at in zip(begin, end, offset, strict=True))


class _Record:
    """Stores what a pickle contains for one object: the arguments of its class or function, and its state.

    It executes nothing. BUILD on the class itself fails, because its `__setstate__` lacks an argument and slots allow
    no other way.
    """

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


_TORCH = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_TORCH, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *((_TORCH, name) for name in ("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.serialization", "_get_layout"), ("torch", "Size")),
    ("builtins", "getattr"),  # used by Python 3.11.0 to 3.11.3 for members of enumerations
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    """Builds only records and plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]  # a constant of C without settable attributes
        if (module, name) in _KNOWN:
            return type(name, (_Record,), {"__slots__": ()})  # a new class each time: nothing shared can be modified
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a checkpoint and the location of each of their parts.

    Raises:
        UserError: `.metadata` requests a class that is not allowed, is damaged, or names files elsewhere.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            state = _Unpickler(file).load().state
        places = {
            (index.state["fqn"], _size(index.state["offset"])): info.state
            for index, info in state["storage_data"].items()
        }
        tensors = {}
        for name, record in state["state_dict_metadata"].items():
            dtype = record.state["properties"].state[0]
            if not isinstance(dtype, torch.dtype) or not isinstance(name, str):
                raise TypeError(f"{name!r} is no tensor")
            blocks = []
            for chunk in record.state["chunks"]:
                offset, place = _size(chunk.state["offsets"]), places[name, _size(chunk.state["offsets"])]
                file_name = check_inside(place["relative_path"], path, "load")
                first, length = torch.Size((place["offset"], place["length"]))  # checks that both are integers
                blocks.append(Block(offset, _size(chunk.state["sizes"]), file_name, first, length))
            tensors[name] = StoredTensor(_size(record.state["size"]), dtype, tuple(blocks))
        return tensors
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise almost any exception
        if is_transient(error):
            raise
        raise UserError(f"load: {path} is no list of tensors ({first_line(error)}); take another checkpoint") from None


def _size(record: Any) -> Sizes:
    """Parse a torch.Size, accepting only integers."""
    return tuple(torch.Size(*record.arguments))
