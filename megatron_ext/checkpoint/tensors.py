"""Write and read a checkpoint's tensors in torch's distributed format, with one record for each shard of a tensor.

    tensors.json          shape and dtype of every tensor, and the location of each of its parts
    __<rank>_0.distcp     the records of one process, each in the format of torch.save
    .metadata             torch's own index for its tools: a pickle, which is never read here

Writing uses torch's planner and writer. Reading is our own: torch's reader unpickles `.metadata`, and loads a record
again for every request that overlaps it, which takes 5 s instead of 0.3 s for 24 row ranges of one 320 MB tensor; here
a record is loaded once and sliced.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BeforeValidator, ConfigDict, NonNegativeInt, PlainSerializer, TypeAdapter, ValidationError
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_ext import heartbeat
from megatron_ext.checkpoint.manifest import FileFacts, check_inside, facts_of, is_transient
from megatron_ext.errors import UserError, first_line
from megatron_ext.files.atomic import sync

INDEX = "tensors.json"
Sizes = tuple[NonNegativeInt, ...]
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


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
    first: NonNegativeInt
    length: NonNegativeInt


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)
    shape: Sizes
    dtype: Annotated[
        torch.dtype, BeforeValidator(_DTYPES.get), PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))
    ]
    blocks: tuple[Block, ...]


_INDEX_FILE = TypeAdapter(dict[str, StoredTensor])


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
    # torch warns if it runs without a process group
    with warnings.catch_warnings(action="ignore") if group is None else nullcontext():
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


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
    """Writes like torch; then computes checksums and, on process 0, writes the index and completes the folder."""

    def __init__(self, folder: Path, complete: Callable[[dict[str, FileFacts]], None]) -> None:
        # copying ahead uses CUDA streams, which in a thread belong to the first GPU
        super().__init__(folder, per_thread_copy_ahead=0)
        self._folder, self._complete = folder, complete

    def storage_meta(self) -> StorageMeta:
        """Return neither path nor time, as the folder is renamed and equal models should give equal files."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file; its checksum is sent to process 0 with the results.

        Raises:
            OSError: with the file's name, which torch's record writer omits.
        """
        done: Future[list[WriteResult]] = Future()
        results: list[Any] = []
        if plan.items:
            path = self._folder / f"{plan.storage_data.prefix}0.distcp"
            try:
                results = super().write_data(plan, planner).wait()
            except (OSError, RuntimeError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
                if not isinstance(cause, OSError):
                    raise
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            results = [*results, {path.name: facts_of(path)}]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write both indices, and complete the folder."""
        files = {name: facts for part in results if part for name, facts in part.pop().items()}
        super().finish(metadata, results)
        index, places = {}, metadata.storage_data
        tensors: dict[str, Any] = metadata.state_dict_metadata  # all are TensorStorageMetadata
        for name, tensor in tensors.items():
            blocks = []
            for chunk in tensor.chunks:
                at = places[MetadataIndex(name, chunk.offsets)]
                blocks.append(Block(tuple(chunk.offsets), tuple(chunk.sizes), at.relative_path, at.offset, at.length))
            index[name] = StoredTensor(tuple(tensor.size), tensor.properties.dtype, tuple(blocks))
        (self._folder / INDEX).write_bytes(_INDEX_FILE.dump_json(index))
        sync([self._folder / INDEX])
        self._complete(files | {name: facts_of(self._folder / name) for name in (INDEX, ".metadata")})


class Stored:
    """Reads the tensors of a checkpoint folder.

    Attributes:
        folder: the checkpoint folder.
        tensors: its tensors by name.

    Raises:
        UserError: the index is damaged, or names files elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / INDEX
        try:
            self.tensors = _INDEX_FILE.validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            if is_transient(error):
                raise
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
            raise UserError(f"load: {path} cannot be read ({reason}); take another checkpoint") from None
        for name in {block.file for tensor in self.tensors.values() for block in tensor.blocks}:
            check_inside(name, path, "load")

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
            raise UserError(f"load: {path} does not hold what {INDEX} says; take another checkpoint")
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
