"""Join parts into Megatron's indexed data set: PREFIX.bin, PREFIX.idx, and the metadata PREFIX.json.

Conversations also have PREFIX.mask.npy: uint8 [tokens], 1 for the assistant's tokens. Documents with sources also have
PREFIX.sources.npy: int32 [documents], the index of each one's source in `document_sources` of the metadata.

.bin: the token ids of all sequences, concatenated. .idx: a header; int32 tokens of each sequence; int64 byte offset of
each sequence; int64 [documents + 1] first sequence of each document, and their number.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.data.text.sources import BLOCK
from megatron_ext.files.atomic import sync

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPE_CODES = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}
MASK, SOURCES = ".mask.npy", ".sources.npy"


def dtype_of(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of the ids on disk, by Megatron's rule."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def suffixes(settings: dict[str, Any]) -> tuple[str, ...]:
    """Return the suffixes of the files of a data set; .idx is written last."""
    mask, sources = settings["chat_template"] is not None, settings["source_field"] is not None
    return (".bin", *[MASK] * mask, *[SOURCES] * sources, ".json", ".idx")


def join_arrays(parts: Sequence[Path]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return each array of all parts, concatenated, and the names of the documents' sources, in order of appearance."""
    loaded = []
    numbers: dict[str, int] = {}
    for part in parts:
        with np.load(part.with_suffix(".npz")) as file:
            arrays = {name: file[name] for name in file.files if name != "about"}
        own = [numbers.setdefault(name, len(numbers)) for name in arrays.pop("source_names").tolist()]
        arrays["sources"] = np.array(own, "<i4")[arrays["sources"]]
        loaded.append(arrays)
    return {name: np.concatenate([arrays[name] for arrays in loaded]) for name in loaded[0]}, list(numbers)


def document_lengths(lengths: np.ndarray, counts: np.ndarray) -> Int64:
    """Return the tokens of each document, from the tokens of each sequence and the sequences of each document."""
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.diff(before[np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])])


def write_dataset(
    prefix: str, folder: Path, parts: Sequence[Path], arrays: dict[str, np.ndarray], metadata: dict[str, Any]
) -> None:
    """Join the parts, in order, into one data set, first in `folder`, then renamed.

    The .idx file, without which the data set cannot be read, is removed first if an old one exists, and is created
    last. So PREFIX is always the old data set, none, or the new one. `metadata` is the content of PREFIX.json.
    """
    partial = {suffix: folder / f"dataset{suffix}" for suffix in suffixes(metadata)}
    dtype, lengths, counts = dtype_of(metadata["vocab_size"]), arrays["lengths"], arrays["counts"]
    with partial[".bin"].open("wb") as target:
        for part in parts:
            with part.with_suffix(".bin").open("rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
    with partial[".idx"].open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], len(lengths), len(counts) + 1))
        file.write(lengths.tobytes())
        sizes = lengths * np.int64(dtype.itemsize)
        file.write((np.cumsum(sizes) - sizes).tobytes())
        file.write(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tobytes())
    for suffix, name in ((MASK, "mask"), (SOURCES, "sources")):
        if suffix in partial:
            np.save(partial[suffix], arrays[name])
    partial[".json"].write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    sync(partial.values())
    for suffix in (".idx", ".json", MASK, SOURCES):  # all of them describe the old data
        Path(prefix + suffix).unlink(missing_ok=True)
    for suffix, path in partial.items():
        path.replace(prefix + suffix)
