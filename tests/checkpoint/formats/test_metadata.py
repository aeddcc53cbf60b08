"""`.metadata` as every Python writes it, and pickles that would reach further."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ext.checkpoint.formats import metadata
from megatron_ext.checkpoint.formats.metadata import METADATA, read_metadata
from megatron_ext.errors import UserError


class Attribute:
    """Pickled as a call of `getattr`, which is how Python 3.11.0 to 3.11.3 writes the member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self.call = getattr, (owner, name)

    def __reduce__(self) -> Any:
        return self.call


def written(folder: Path, value: Any) -> Path:
    (folder / METADATA).write_bytes(pickle.dumps(value))
    return folder


def tensors() -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    facts = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([2]), [chunk])
    return Metadata({"weight": facts}, storage_data={MetadataIndex("weight"): _info("0.distcp")})


def _info(name: str) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, 0, 4)


def test_a_list_of_tensors_is_read(tmp_path: Path) -> None:
    found = read_metadata(written(tmp_path, tensors()))
    assert found.state_dict_metadata["weight"].properties.dtype is torch.bfloat16  # type: ignore[union-attr]


def test_the_member_of_an_enumeration_may_be_an_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reduced(member: Any, protocol: int) -> Any:
        return getattr, (_MEM_FORMAT_ENCODING, member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    found = read_metadata(written(tmp_path, tensors()))
    assert found.state_dict_metadata["weight"].properties.memory_format is torch.contiguous_format  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("owner", "name"), [(torch.Size, "__class__"), (_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__globals__")]
)
def test_no_other_attribute_is_reached(tmp_path: Path, owner: Any, name: str) -> None:
    with pytest.raises(UserError, match=r"\.metadata is no list of tensors"):
        read_metadata(written(tmp_path, Attribute(owner, name)))


@pytest.mark.parametrize(
    "value",
    [
        3,
        Metadata(None, storage_data={}),  # type: ignore[arg-type]
        Metadata({}, storage_data=None),
        Metadata({}, storage_data={"weight": _info("0.distcp")}),
        Metadata({}, storage_data={MetadataIndex("weight"): None}),
        Metadata({}, storage_data={MetadataIndex("weight"): _info(None)}),  # type: ignore[arg-type]
    ],
    ids=["a number", "no tensors", "no places", "a place of no index", "no place", "a place in no file"],
)
def test_a_list_that_is_none_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^load: {tmp_path}/\.metadata is no list of tensors"):
        read_metadata(written(tmp_path, value))


def test_bytes_and_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="BytesStorageMetadata"):
        read_metadata(written(tmp_path, Metadata({"weight": BytesStorageMetadata()}, storage_data={})))
    elsewhere = Metadata({}, storage_data={MetadataIndex("weight"): _info("../0.distcp")})
    with pytest.raises(UserError, match="outside its folder"):
        read_metadata(written(tmp_path, elsewhere))


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
    owners += [*_MEM_FORMAT_ENCODING, metadata._Unpickler, *vars(metadata).values()]
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


def test_a_pickle_can_change_what_it_is_given() -> None:
    """Without which nothing above could fail."""

    class Given:
        pass

    class Finds(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Given

    Finds(io.BytesIO(b"\x80\x04ca\nb\n" + TRICKS["slots of a class"] + b".")).load()
    assert Given.planted == "evil"  # type: ignore[attr-defined]


def test_what_is_read_is_what_torch_reads(tmp_path: Path) -> None:
    written(tmp_path, tensors())
    found, theirs = read_metadata(tmp_path), pickle.loads((tmp_path / METADATA).read_bytes())
    assert found.state_dict_metadata == theirs.state_dict_metadata
    ours, torchs = ({index: asdict(info) for index, info in read.storage_data.items()} for read in (found, theirs))
    assert ours == torchs


def test_the_objects_are_torchs_own_and_complete(tmp_path: Path) -> None:
    """A field that is missing or of another type would show where it is used, far from its file."""
    for change in (
        {"size": torch.Size([2]), "chunks": None},
        {"size": (2,), "chunks": []},
        {"size": torch.Size([2]), "chunks": [], "properties": None},
    ):
        damaged = tensors()
        vars(damaged.state_dict_metadata["weight"]).update(change)
        with pytest.raises(UserError, match=r"\.metadata is no list of tensors"):
            read_metadata(written(tmp_path, damaged))
