"""The list of a checkpoint's tensors, `.metadata`, read without unpickling any object of it.

A pickle is a program: it may call every class and function that its reader finds for it, and set attributes of each.
So the reader finds none. Every name that such a list uses stands for a `_Record`, which keeps arguments and state and
does nothing; what the records say is looked at afterwards, and torch's objects are made from it by our own calls.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
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


class _Record:
    """What a pickle says of one object: the arguments of its class or function, and the state it is given.

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
    (kind.__module__, kind.__name__): kind
    for kind in (
        *(_METADATA, _INDEX, _STORAGE_META, _TENSOR, _PROPERTIES, _CHUNK, _FORMAT),
        *(_PLACE, _LAYOUT, _SIZE, _ATTRIBUTE),
    )
}


class _Unpickler(pickle.Unpickler):
    """Builds records, and plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]  # a constant of C, which has no attribute that can be set
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """The list of tensors in a checkpoint and where each part of them lies.

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
    for place in metadata.storage_data.values():
        check_inside(place.relative_path, path, "load")
    return metadata


def _metadata(found: Any) -> Metadata:
    """The tensors and their places; what planners and writers keep beside them is not read."""
    state = _state(found, _METADATA)
    tensors, places = (_checked(state.get(name), dict) for name in ("state_dict_metadata", "storage_data"))
    return Metadata(
        {_checked(name, str): _tensor(facts) for name, facts in tensors.items()},
        storage_data={_index(index): _place(place) for index, place in places.items()},
    )


def _tensor(found: Any) -> TensorStorageMetadata:
    state = _state(found, _TENSOR)
    chunks = [_state(chunk, _CHUNK) for chunk in _checked(state.get("chunks"), list)]
    return TensorStorageMetadata(
        _properties(state.get("properties")),
        _size(state.get("size")),
        [ChunkStorageMetadata(_size(chunk.get("offsets")), _size(chunk.get("sizes"))) for chunk in chunks],
    )


def _properties(found: Any) -> TensorProperties:
    dtype, layout, requires_grad, memory_format, pin_memory = _checked(_checked(found, _PROPERTIES).state, tuple)
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


def _index(found: Any) -> MetadataIndex:
    state = _state(found, _INDEX)
    offset, hint = state.get("offset"), state.get("index")
    return MetadataIndex(
        _checked(state.get("fqn"), str),
        None if offset is None else _size(offset),
        None if hint is None else _checked(hint, int),
    )


def _place(found: Any) -> _StorageInfo:
    state = _state(found, _PLACE)
    if state.get("transform_descriptors"):
        raise ValueError("a tensor is stored in an encoding that this reader does not know")
    return _StorageInfo(
        _checked(state.get("relative_path"), str),
        _checked(state.get("offset"), int),
        _checked(state.get("length"), int),
    )


def _size(found: Any) -> torch.Size:
    (numbers,) = _checked(found, _SIZE).arguments or ((),)
    return torch.Size([_checked(number, int) for number in _checked(numbers, tuple | list)])


def _state(found: Any, kind: type[_Record]) -> dict[Any, Any]:
    """The attributes of a record of this kind."""
    state: dict[Any, Any] = _checked(_checked(found, kind).state, dict)
    return state


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"it holds {type(value).__name__} where {getattr(kind, '__name__', kind)} stands")
    return value
