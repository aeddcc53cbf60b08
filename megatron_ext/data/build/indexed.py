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
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from megatron_ext.data.build.lengths import Statistics, Table, length_statistics, length_table
from megatron_ext.data.build.parts import Counts, Part
from megatron_ext.data.text.documents import PROBLEMS_KEPT
from megatron_ext.data.text.sources import BLOCK
from megatron_ext.files.atomic import sync

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
MASK, SOURCES = ".mask.npy", ".sources.npy"
DTYPE_CODES = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}


@dataclass
class Totals(Counts):
    """The sums over all parts.

    Attributes:
        lengths, length_statistics: document lengths, see `lengths`.
        checksums: SHA-256 of the files that were read, by path.
        source_names: names of the documents' sources, in order of appearance.
    """

    lengths: Table = field(default_factory=list)
    length_statistics: Statistics | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    source_names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[Part], spills: Sequence[Part] = ()) -> Totals:
        """Sum the parts' records and lengths; `spills` are the parts of a preceding grouping."""
        totals = cls()
        for part in (*spills, *parts):
            record = part.record()
            for name, number in record.counts().items():
                setattr(totals, name, getattr(totals, name) + number)
            totals.checksums |= record.checksums
        del totals.problems[PROBLEMS_KEPT:]
        documents = np.concatenate([np.zeros(0, np.int64), *(_document_lengths(*_lengths(part)) for part in parts)])
        totals.lengths, totals.length_statistics = length_table(documents), length_statistics(documents)
        totals.source_names = list(dict.fromkeys(name for part in parts for name in _sources(part)[0]))
        return totals


def write_dataset(
    prefix: str,
    folder: Path,
    parts: Sequence[Part],
    dtype: type[np.generic],
    totals: Totals,
    card: dict[str, object],
    *,
    masked: bool = False,
    sourced: bool = False,
) -> None:
    """Join the parts, in order, into one data set, first in `folder`, then renamed.

    `masked` and `sourced` add the masks and the documents' sources. The .idx file, without which the data set cannot be
    read, is removed first if an old one exists, and is created last. So PREFIX is always the old data set, none, or the
    new one. Memory holds one part's lengths and mask at a time.
    """
    suffixes = (".bin", *((MASK,) if masked else ()), *((SOURCES,) if sourced else ()), ".json", ".idx")
    aside = {suffix: folder / f"dataset{suffix}" for suffix in suffixes}
    with aside[".bin"].open("wb") as target:
        for part in parts:
            with part.content.open("rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
    _write_index(aside[".idx"], parts, np.dtype(dtype), totals)
    if masked:
        with aside[MASK].open("wb") as file:
            _put_header(file, "|u1", totals.tokens)
            for part in parts:
                with np.load(part.arrays) as arrays:
                    file.write(arrays["mask"].tobytes())
    if sourced:
        number = {name: number for number, name in enumerate(totals.source_names)}
        with aside[SOURCES].open("wb") as file:
            _put_header(file, "<i4", totals.documents)
            for names, own in map(_sources, parts):
                file.write(np.array([number[name] for name in names], "<i4")[own].tobytes())
    aside[".json"].write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    sync(aside.values())
    for suffix in (".idx", ".json", MASK, SOURCES):  # all of them describe the old data
        Path(prefix + suffix).unlink(missing_ok=True)
    for suffix, path in aside.items():
        path.replace(prefix + suffix)


def is_whole(prefix: str, dtype: type[np.generic], totals: Counts, masked: bool = False, sourced: bool = False) -> bool:
    """Return whether all files of a data set exist with the sizes that `write_dataset` gives them."""
    sizes = {
        ".bin": totals.tokens * np.dtype(dtype).itemsize,
        ".idx": HEADER.size + (4 + 8) * totals.sequences + 8 * (totals.documents + 1),
    }
    for suffix, wanted, kind, count in (
        (MASK, masked, "|u1", totals.tokens),
        (SOURCES, sourced, "<i4", totals.documents),
    ):
        if wanted:
            header = BytesIO()
            _put_header(header, kind, count)
            sizes[suffix] = header.tell() + count * np.dtype(kind).itemsize
    paths = {Path(prefix + suffix): size for suffix, size in sizes.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def _write_index(path: Path, parts: Sequence[Part], dtype: np.dtype[np.generic], totals: Totals) -> None:
    # The three arrays are written in parallel, one part at a time, so that only one part's lengths are in memory.
    pointers_at = HEADER.size + 4 * totals.sequences
    borders_at = pointers_at + 8 * totals.sequences
    sequences = offset = 0
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], totals.sequences, totals.documents + 1))
        for lengths, counts in map(_lengths, parts):
            sizes = lengths.astype(np.int64) * dtype.itemsize
            ends = np.cumsum(counts, dtype=np.int64)
            _put(file, HEADER.size + 4 * sequences, lengths)
            _put(file, pointers_at + 8 * sequences, offset + np.cumsum(sizes) - sizes)
            _put(file, borders_at, sequences + ends - counts)
            borders_at += 8 * len(counts)
            sequences += len(lengths)
            offset += int(sizes.sum())
        _put(file, borders_at, np.array([sequences]))


def _put_header(file: IO[bytes], kind: str, count: int) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (count,)})


def _put(file: BinaryIO, offset: int, values: np.ndarray) -> None:
    file.seek(offset)
    file.write(values.tobytes())


def _lengths(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each sequence and the sequences of each document, both int32."""
    with np.load(part.arrays) as arrays:
        return arrays["lengths"], arrays["counts"]


def _document_lengths(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.diff(before[np.concatenate([[0], np.cumsum(counts)])])


def _sources(part: Part) -> tuple[list[str], np.ndarray]:
    """Return the names of a part's sources and each document's index into them; empty if it has no sources."""
    with np.load(part.arrays) as arrays:
        if "sources" not in arrays:
            return [], np.zeros(0, np.int32)
        return arrays["source_names"].tolist(), arrays["sources"]
