"""`.metadata` as every Python writes it, and pickles that would reach further."""

from __future__ import annotations

import pickle
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

from megatron_ext.checkpoint.metadata import METADATA, read_metadata
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
