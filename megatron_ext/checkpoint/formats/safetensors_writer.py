"""Write safetensors files piece by piece: no tensor is ever whole in memory.

A file is 8 bytes of header length, the header (JSON: each tensor's dtype, shape and place), then the tensors'
bytes one after the other. A model of several files has an index, model.safetensors.index.json.

The libraries hold a whole file in memory. For one of 256 MiB in tensors of 16 MiB the peak grows by 258 MiB with
safetensors.torch.save_file, by 771 MiB with torch's HuggingFaceStorageWriter, even where its planner makes each tensor
when it is asked for, and by 11 to 19 MiB here (benchmarks/conversion.py); files of 5 GB are the default.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.errors import UserError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorPlan:
    """Describes a tensor to be written: its name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse_size(text: str) -> int:
    """Read a number of bytes: "5GB", "500MB", "8KB" or a plain number.

    Raises:
        UserError: none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", text.strip().upper())
    size = int(float(match.group(1)) * _UNITS[match.group(2) or "B"]) if match else 0
    if size < 1:
        raise UserError(f"max_shard_size: got {text!r}, needs a size such as 5GB or 500MB")
    return size


def split(tensors: Iterable[TensorPlan], max_bytes: int) -> dict[str, list[TensorPlan]]:
    """Share tensors out over files, in order; a tensor larger than `max_bytes` has a file of its own."""
    shards: list[list[TensorPlan]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def write_index(folder: Path, files: Mapping[str, Sequence[TensorPlan]]) -> None:
    """Write the index that says which file holds which tensor; nothing where there is one file."""
    if list(files) == [SINGLE]:
        return
    everything = [tensor for shard in files.values() for tensor in shard]
    parameters = sum(math.prod(tensor.shape) for tensor in everything)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": sum(tensor.bytes for tensor in everything)},
        "weight_map": {tensor.name: file for file, shard in files.items() for tensor in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
    path: Path, tensors: Sequence[TensorPlan], pieces: Iterable[tuple[TensorPlan, Iterator[Tensor]]]
) -> None:
    """Write one file, block by block.

    Args:
        path: of the file.
        tensors: what it holds, in order.
        pieces: each of `tensors` in the same order with its rows, top to bottom, in blocks of any number of rows.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    first = 0
    for tensor in tensors:
        span = [first, first + tensor.bytes]
        entries[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        first += tensor.bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor, blocks in pieces:
            end = file.tell() + tensor.bytes
            for block in blocks:
                assert block.dtype is tensor.dtype, (tensor, block.dtype)
                file.write(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                del block  # before the next one is read
            assert file.tell() == end, tensor
