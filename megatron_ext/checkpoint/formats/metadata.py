"""Read the list of a checkpoint's tensors, `.metadata`, without unpickling any object of it.

A pickle is a program: it may call every class and function that its reader finds for it, and set attributes of each.
So the reader finds none. Every name that such a list uses stands for a `_Record`, which keeps arguments and state and
does nothing; what the records say is looked at afterwards, and torch's objects are made from it by our own calls.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ext.checkpoint.inside import check_inside
from megatron_ext.errors import UserError

METADATA = ".metadata"
COMMON = "common.pt"
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_TORCH = "torch.distributed.checkpoint.metadata"
_CONTIGUOUS = (0, "TORCH_CONTIGUOUS_FORMAT")  # the member's value; Python 3.11.0 to 3.11.3 write its name


@dataclass(frozen=True)
class StorageInfo:
    """Tells where a block of a tensor is stored; torch's reader takes it for its own, whose fields it has.

    Attributes:
        relative_path: of the file, from the checkpoint's folder.
        offset, length: of the block's record in it, in bytes.
        transform_descriptors: how the record is encoded: not at all.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Record:
    """Keeps what a pickle says of one object: the arguments of its class or function, and the state it is given.

    BUILD finds `__setstate__` on a record's class as well, where it lacks an argument and fails: classes keep their
    attributes. Slots leave a record without a dictionary of its own.
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


def _stands_for(module: str, name: str) -> type[_Record]:
    return type(name, (_Record,), {"__slots__": (), "__module__": module})


_METADATA = _stands_for(_TORCH, "Metadata")
_INDEX = _stands_for(_TORCH, "MetadataIndex")
_STORAGE_META = _stands_for(_TORCH, "StorageMeta")
_TENSOR = _stands_for(_TORCH, "TensorStorageMetadata")
_PROPERTIES = _stands_for(_TORCH, "TensorProperties")
_CHUNK = _stands_for(_TORCH, "ChunkStorageMetadata")
_FORMAT = _stands_for(_TORCH, "_MEM_FORMAT_ENCODING")
_PLACE = _stands_for("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_LAYOUT = _stands_for("torch.serialization", "_get_layout")
_SIZE = _stands_for("torch", "Size")
_ATTRIBUTE = _stands_for("builtins", "getattr")
_KNOWN = {
    (known.__module__, known.__name__): known
    for known in (
        *(_METADATA, _INDEX, _STORAGE_META, _TENSOR, _PROPERTIES, _CHUNK, _FORMAT),
        *(_PLACE, _LAYOUT, _SIZE, _ATTRIBUTE),
    )
}


class _Unpickler(pickle.Unpickler):
    """Builds records and plain values, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]  # a constant of C, which has no attribute that can be set
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """Read which tensors a checkpoint holds, and where each part of them lies.

    Raises:
        UserError: `.metadata` asks for a class that no such list has, cannot be read, or names files elsewhere.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _metadata(_Unpickler(file).load())
    except OSError as error:
        raise UserError(f"load: {path} cannot be read ({error.strerror}); take another checkpoint") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"load: {path} is no list of tensors ({error}); take another checkpoint") from None
    for stored in metadata.storage_data.values():
        check_inside(stored.relative_path, path, "load")
    return metadata


def _metadata(pickled: Any) -> Metadata:
    """Make torch's list of the tensors and of where they lie; what planners and writers keep beside is not read."""
    state = _state(pickled, _METADATA)
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, StorageInfo] = {}
    for name, record in _checked(state.get("state_dict_metadata"), dict).items():
        tensor = _state(record, _TENSOR)
        chunks = [_state(chunk, _CHUNK) for chunk in _checked(tensor.get("chunks"), list)]
        tensors[_checked(name, str)] = TensorStorageMetadata(
            _properties(tensor.get("properties")),
            _size(tensor.get("size")),
            [ChunkStorageMetadata(_size(chunk.get("offsets")), _size(chunk.get("sizes"))) for chunk in chunks],
        )
    for key, record in _checked(state.get("storage_data"), dict).items():
        block, info = _state(key, _INDEX), _state(record, _PLACE)
        offset, hint = block.get("offset"), block.get("index")
        index = MetadataIndex(
            _checked(block.get("fqn"), str),
            None if offset is None else _size(offset),
            None if hint is None else _checked(hint, int),
        )
        if info.get("transform_descriptors"):
            raise ValueError("a tensor is stored in an encoding that this reader does not know")
        path, start, length = (info.get(name) for name in ("relative_path", "offset", "length"))
        stored[index] = StorageInfo(_checked(path, str), _checked(start, int), _checked(length, int))
    return Metadata(tensors, storage_data=stored)


def _properties(record: Any) -> TensorProperties:
    dtype, layout, requires_grad, memory_format, pin_memory = _checked(_checked(record, _PROPERTIES).state, tuple)
    if _checked(layout, _LAYOUT).arguments != ("torch.strided",):
        raise ValueError("a tensor is not strided")
    is_attribute = isinstance(memory_format, _ATTRIBUTE)
    asked = memory_format.arguments if is_attribute else (_FORMAT, *_checked(memory_format, _FORMAT).arguments)
    if asked[0] is not _FORMAT or len(asked) != 2 or asked[1] != _CONTIGUOUS[is_attribute]:
        raise ValueError("a tensor is not contiguous")
    return TensorProperties(
        dtype=_checked(dtype, torch.dtype),
        requires_grad=_checked(requires_grad, bool),
        pin_memory=_checked(pin_memory, bool),
    )


def _size(record: Any) -> torch.Size:
    (numbers,) = _checked(record, _SIZE).arguments or ((),)
    return torch.Size([_checked(number, int) for number in _checked(numbers, tuple | list)])


def _state(record: Any, stands_for: type[_Record]) -> dict[Any, Any]:
    """Return the attributes of a record of this class."""
    state: dict[Any, Any] = _checked(_checked(record, stands_for).state, dict)
    return state


def _checked(value: Any, wanted: Any) -> Any:
    if not isinstance(value, wanted):
        raise TypeError(f"it holds {type(value).__name__}, needs {getattr(wanted, '__name__', wanted)}")
    return value
