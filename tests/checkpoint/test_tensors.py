"""Tensors of a checkpoint: written by several processes, read under any cut, and lists that would run a program."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launcher import call
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ext.checkpoint import tensors as checkpoint_tensors
from megatron_ext.checkpoint.manifest import FileFacts, facts_of
from megatron_ext.checkpoint.tensors import METADATA, Block, Shard, Stored, StoredTensor, read_metadata, write
from megatron_ext.errors import UserError

MATRIX = torch.arange(28, dtype=torch.float32).reshape(4, 7)
VECTOR = torch.arange(10, dtype=torch.bfloat16)


def part(name: str, whole: Tensor, *spans: slice) -> Shard:
    """A part of a tensor, in memory of its own."""
    offset = tuple(span.start or 0 for span in (*spans, *[slice(None)] * whole.dim()))[: whole.dim()]
    return Shard.of(name, whole[spans].clone(), tuple(whole.shape), offset)


def written(folder: Path) -> dict[str, FileFacts]:
    """Write both, the matrix as four rectangles."""
    facts: dict[str, FileFacts] = {}
    rectangles = [(slice(a, b), slice(c, d)) for a, b in ((0, 1), (1, 4)) for c, d in ((0, 3), (3, 7))]
    shards = [*(part("matrix", MATRIX, *spans) for spans in rectangles), part("vector", VECTOR)]
    write(folder, [*shards, replace(part("elsewhere", VECTOR), writes=False)], facts.update)
    return facts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path)
    return tmp_path


def test_whole_tensors_come_back_and_torch_reads_the_same(folder: Path) -> None:
    stored = Stored(folder)
    assert {name: (one.shape, one.dtype) for name, one in stored.tensors.items()} == {
        "matrix": ((4, 7), torch.float32),
        "vector": ((10,), torch.bfloat16),
    }
    state = {"matrix": torch.zeros_like(MATRIX), "vector": torch.zeros_like(VECTOR)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name, whole in (("matrix", MATRIX), ("vector", VECTOR)):
        assert torch.equal(stored.read(name), whole)
        assert torch.equal(state[name], whole)


def test_any_part_is_read_and_each_record_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, loads = Stored(folder), []
    load = stored._load
    monkeypatch.setattr(stored, "_load", lambda block: (loads.append(block), load(block))[1])
    spans = [(slice(a, b), slice(c, d)) for a, b in ((0, 2), (2, 4)) for c, d in ((0, 5), (5, 7))]
    shards = [part("matrix", torch.zeros_like(MATRIX), *span) for span in spans]
    stored.fill(shards)
    for shard, span in zip(shards, spans, strict=True):
        assert torch.equal(shard.data(), MATRIX[span])
    assert len(loads) == len(set(loads)) == 4


def test_files_have_their_checksums_and_the_same_tensors_give_the_same_files(tmp_path: Path) -> None:
    """Neither a path nor a time is in them."""
    one, other = tmp_path / "one", tmp_path / "other"
    facts = written(one)
    assert facts == {path.name: facts_of(path) for path in one.iterdir()}
    assert sorted(facts) == [METADATA, "__0_0.distcp"]
    assert written(other) == facts


def test_memory_of_what_is_made_to_be_written_is_freed(tmp_path: Path) -> None:
    """One tensor at a time; a view is copied, its memory stays."""
    made: list[Tensor] = []

    def make(number: int) -> Tensor:
        made.append(MATRIX + number)
        return made[-1]

    shards = [
        Shard(str(number), (4, 7), (0, 0), (4, 7), torch.float32, partial(make, number), made=True)
        for number in range(3)
    ]
    kept = MATRIX.clone()
    write(tmp_path, [*shards, Shard.of("view", kept[1:2], (1, 7), (0, 0))], lambda files: None)
    assert [tensor.untyped_storage().nbytes() for tensor in made] == [0, 0, 0]
    assert torch.equal(kept, MATRIX)
    assert [Stored(tmp_path).read(str(number))[0, 0] for number in range(3)] == [0, 1, 2]
    assert torch.equal(Stored(tmp_path).read("view"), MATRIX[1:2])
    assert (tmp_path / "__0_0.distcp").stat().st_size < 4 * 3000


def test_another_padding_where_it_may_be(folder: Path) -> None:
    longer, shorter = (torch.zeros(rows, 7) for rows in (5, 3))
    for whole in (longer, shorter):
        shard = Shard.of("matrix", whole, tuple(whole.shape), (0, 0))
        with pytest.raises(UserError, match=rf"^matrix: got \({len(whole)}, 7\), "):
            Stored(folder).fill([shard])
        Stored(folder).fill([shard], padded=True)
    assert torch.equal(longer[:4], MATRIX)
    assert not longer[4].any()
    assert torch.equal(shorter, MATRIX[:3])


def test_what_is_missing_or_damaged_is_named(folder: Path) -> None:
    stored = Stored(folder)
    with pytest.raises(UserError, match="has no tensor norm"):
        stored.read("norm")
    matrix = stored.tensors["matrix"]
    stored.tensors["matrix"] = replace(matrix, blocks=matrix.blocks[:3])
    with pytest.raises(UserError, match="lacks part of matrix"):
        stored.read("matrix")
    stored.tensors["matrix"] = replace(matrix, blocks=(replace(matrix.blocks[0], sizes=(2, 3)), *matrix.blocks[1:]))
    with pytest.raises(UserError, match=r"__0_0\.distcp does not hold what \.metadata says"):
        stored.read("matrix")
    content = folder / "__0_0.distcp"
    whole = content.read_bytes()
    for damaged in (whole[:100], b"", bytes(len(whole)), b"\x80" * len(whole), b"(" + whole[1:]):
        content.write_bytes(damaged)
        with pytest.raises(UserError, match=r"^load: .*__0_0\.distcp cannot be read \(.+\); take another checkpoint$"):
            [Stored(folder).read(name) for name in ("matrix", "vector")]
    content.unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read"):
        Stored(folder).read("vector")


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_what_may_pass_by_is_no_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Bad input ends a job for good; after a crash it is started again."""
    original = Path.open

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match=os.strerror(number)):
        Stored(folder).read("vector")


def test_memory_that_runs_out_is_no_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A device without room."""

        def copy_(self, tensor: Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def __getitem__(self, spans: object) -> Full:
            return self

    shard = replace(part("vector", VECTOR), data=Full)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        Stored(folder).fill([shard])


def halves(rank: int, folder: Path, failing: int | None) -> str:
    """Write a row for each process; what this one is told."""

    def made() -> Tensor:
        if rank == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return MATRIX[2 * rank : 2 * rank + 2].clone()

    shard = Shard("matrix", (4, 7), (2 * rank, 0), (2, 7), torch.float32, made)
    done: dict[str, FileFacts] = {}
    try:
        write(folder, [shard], done.update, dist.group.WORLD)
    except CheckpointException as error:
        ((number, (failure, _)),) = error.failures.items()
        return f"{number}: {failure!r}"
    return " ".join(sorted(done))


def test_processes_write_together(tmp_path: Path) -> None:
    assert call(halves, 2, tmp_path, None) == [f"{METADATA} __0_0.distcp __1_0.distcp", ""]
    assert torch.equal(Stored(tmp_path).read("matrix"), MATRIX)


def test_a_process_that_cannot_write_is_named_to_all(tmp_path: Path) -> None:
    said = call(halves, 2, tmp_path, 1)
    assert said[0] == said[1]
    assert said[0].startswith("1: OSError(28")
    assert not (tmp_path / METADATA).exists()


def listed(folder: Path, value: Any) -> Path:
    (folder / METADATA).write_bytes(pickle.dumps(value))
    return folder


def tensors() -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    facts = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([2]), [chunk])
    return Metadata({"weight": facts}, storage_data={MetadataIndex("weight", torch.Size([0])): _info("0.distcp")})


def _info(name: str) -> Any:
    return _StorageInfo(name, 0, 4)


def test_a_list_of_tensors_is_read(tmp_path: Path) -> None:
    found = read_metadata(listed(tmp_path, tensors()))
    assert found == {"weight": StoredTensor((2,), torch.bfloat16, (Block((0,), (2,), "0.distcp", 0, 4),))}


def test_the_member_of_an_enumeration_may_be_an_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduced(member: Any, protocol: int) -> Any:
        return getattr, (_MEM_FORMAT_ENCODING, member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    assert read_metadata(listed(tmp_path, tensors())).keys() == {"weight"}


@pytest.mark.parametrize(
    "value",
    [
        3,
        Metadata(None, storage_data={}),  # type: ignore[arg-type]
        Metadata({}, storage_data=None),
        Metadata({}, storage_data={"weight": _info("0.distcp")}),
        Metadata(tensors().state_dict_metadata, storage_data={}),
    ],
    ids=["a number", "no tensors", "no places", "a place of no index", "a tensor in no place"],
)
def test_a_list_that_is_none_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^load: {tmp_path}/\.metadata is no list of tensors"):
        read_metadata(listed(tmp_path, value))


def test_bytes_and_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="BytesStorageMetadata"):
        read_metadata(listed(tmp_path, Metadata({"weight": BytesStorageMetadata()}, storage_data={})))
    elsewhere = tensors()
    elsewhere.storage_data = {MetadataIndex("weight", torch.Size([0])): _info("../0.distcp")}
    with pytest.raises(UserError, match="outside its folder"):
        read_metadata(listed(tmp_path, elsewhere))


SHARED = [
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("builtins", "getattr"),
]
MEMBER = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(K\x00tR"
PLANT = b"}(\x8c\x07planted\x8c\x04evilu"  # {"planted": "evil"}
SLOTS = b"N" + PLANT + b"\x86"  # (None, {"planted": "evil"}): BUILD sets it by setattr
TRICKS = {
    "state of a class": PLANT + b"b",
    "slots of a class": SLOTS + b"b",
    "state of the state": b"(" + PLANT + PLANT + b"\x86tb",
    "an item": b"\x8c\x07planted\x8c\x04evils",
    "items": b"(\x8c\x07planted\x8c\x04evilu",
    "appended": b"(\x8c\x07plantede",
}


def shared() -> list[Any]:
    """What every reader of this process uses, and what can be seen of each."""
    owners = [getattr(importlib.import_module(module), name) for module, name in SHARED if module != "builtins"]
    owners += [*_MEM_FORMAT_ENCODING, checkpoint_tensors._Unpickler, *vars(checkpoint_tensors).values()]
    return [(owner, dict(vars(owner))) for owner in owners if hasattr(owner, "__dict__")]


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
@pytest.mark.parametrize("name", [*SHARED, None], ids=lambda name: name and name[1])
def test_nothing_that_others_use_is_changed(tmp_path: Path, name: tuple[str, str] | None, trick: bytes) -> None:
    """A pickle that sets an attribute of what it was given by name, and then lists no tensor at all."""
    given = MEMBER if name is None else f"c{name[0]}\n{name[1]}\n".encode()
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + given + trick + b"0" + pickle.dumps(Metadata({}, {}, {}))[2:])
    before = shared()
    with contextlib.suppress(UserError):
        read_metadata(tmp_path)
    assert shared() == before


def test_the_hash_of_an_index_is_torchs_own(tmp_path: Path) -> None:
    before = MetadataIndex.__hash__
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    size = b"ctorch\nSize\n"
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + index + b"}\x8c\x08__hash__" + size + b"sb.")
    try:
        with pytest.raises(UserError, match=r"\.metadata is no list of tensors"):
            read_metadata(tmp_path)
        assert MetadataIndex.__hash__ is before
    finally:
        if MetadataIndex.__hash__ is not before:
            MetadataIndex.__hash__ = before  # type: ignore[method-assign]
