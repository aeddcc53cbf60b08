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

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.data.build.parts import MASK, SOURCES, Settings
from megatron_ext.data.text.sources import BLOCK
from megatron_ext.files.atomic import sync

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPE_CODES = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}


def joined(parts: Sequence[Path], name: str) -> np.ndarray:
    """Return an array of all parts, concatenated."""
    arrays = []
    for part in parts:
        with np.load(part.with_suffix(".npz")) as of_part:
            arrays.append(of_part[name])
    return np.concatenate(arrays)


def source_numbers(parts: Sequence[Path]) -> tuple[list[str], np.ndarray]:
    """Return the names of the documents' sources, in order of appearance, and each document's index, int32 [n]."""
    numbers: dict[str, int] = {}
    of_documents = []
    for part in parts:
        with np.load(part.with_suffix(".npz")) as arrays:
            own = [numbers.setdefault(name, len(numbers)) for name in arrays["source_names"].tolist()]
            of_documents.append(np.array(own, "<i4")[arrays["sources"]])
    return list(numbers), np.concatenate(of_documents)


def document_lengths(lengths: np.ndarray, counts: np.ndarray) -> Int64:
    """Return the tokens of each document, from the tokens of each sequence and the sequences of each document."""
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.diff(before[np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])])


def write_dataset(
    prefix: str, folder: Path, parts: Sequence[Path], settings: Settings, metadata: dict[str, object]
) -> None:
    """Join the parts, in order, into one data set, first in `folder`, then renamed.

    The .idx file, without which the data set cannot be read, is removed first if an old one exists, and is created
    last. So PREFIX is always the old data set, none, or the new one.
    """
    partial = {suffix: folder / f"dataset{suffix}" for suffix in settings.suffixes}
    with partial[".bin"].open("wb") as target:
        for part in parts:
            with part.with_suffix(".bin").open("rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
    lengths, counts = joined(parts, "lengths"), joined(parts, "counts")
    with partial[".idx"].open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[settings.dtype], len(lengths), len(counts) + 1))
        file.write(lengths.tobytes())
        sizes = lengths * np.int64(settings.dtype.itemsize)
        file.write((np.cumsum(sizes) - sizes).tobytes())
        file.write(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tobytes())
    if MASK in partial:
        np.save(partial[MASK], joined(parts, "mask"))
    if SOURCES in partial:
        np.save(partial[SOURCES], source_numbers(parts)[1])
    partial[".json"].write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    sync(partial.values())
    for suffix in (".idx", ".json", MASK, SOURCES):  # all of them describe the old data
        Path(prefix + suffix).unlink(missing_ok=True)
    for suffix, path in partial.items():
        path.replace(prefix + suffix)
