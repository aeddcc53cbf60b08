"""The list of a checkpoint's tensors, `.metadata`, read without unpickling more than its few classes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex, TensorStorageMetadata

from megatron_ext.errors import UserError

METADATA = ".metadata"
COMMON = "common.pt"
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_KNOWN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


def _member(kind: Any, name: Any) -> Any:
    """What `getattr` does in the pickle of an enumeration's member by Python 3.11.0 to 3.11.3, and nothing else."""
    if kind is not _MEM_FORMAT_ENCODING or not isinstance(name, str):
        raise pickle.UnpicklingError(f"it asks for the attribute {name!r} of {kind!r}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Builds the classes of a Metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """The list of tensors in a checkpoint and where each part of them lies.

    Raises:
        UserError: `.metadata` asks for a class that no such list has, cannot be read, or names files elsewhere.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except OSError as error:
        raise UserError(f"load: {path} cannot be read ({error.strerror}); take another checkpoint") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"load: {path} is no list of tensors ({error}); take another checkpoint") from None
    _check_metadata(metadata, path)
    return metadata


def _check_metadata(metadata: Any, path: Path) -> None:
    if not _is_list(metadata):
        raise UserError(f"load: {path} is no list of tensors and of their places; take another checkpoint")
    for name, facts in metadata.state_dict_metadata.items():
        if not isinstance(facts, TensorStorageMetadata):
            raise UserError(f"load: {path} lists {name}, which is no tensor; only tensors are read")
    names = {info.relative_path for info in metadata.storage_data.values()}
    for name in names:
        if Path(name).name != name:
            raise UserError(f"load: {path} names {name}, which is outside its folder; take another checkpoint")


def _is_list(metadata: Any) -> bool:
    """A Metadata with both of its tables; unpickling fills a class with anything."""
    return (
        isinstance(metadata, Metadata)
        and isinstance(getattr(metadata, "state_dict_metadata", None), dict)
        and isinstance(getattr(metadata, "storage_data", None), dict)
        and all(isinstance(index, MetadataIndex) for index in metadata.storage_data)
        and all(isinstance(getattr(info, "relative_path", None), str) for info in metadata.storage_data.values())
    )
