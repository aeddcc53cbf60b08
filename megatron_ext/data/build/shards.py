"""Cut the inputs into shards, the unit of work and of resuming.

The cuts depend only on the sources, so the data set does not depend on the number of workers. Large .jsonl and .parquet
files are cut into parts; a compressed file is one shard, because it can only be read from the beginning.

To join the documents of each group (all files of a repository, all chapters of a book) in bounded memory, the texts are
first written to disk, listed by a hash of their group's key, and then read again by ranges of hashes:

    FileShards --in parallel--> texts on disk --group--> GroupShards, each with whole groups

Groups are ordered by the hash of their keys, a fixed shuffle that depends only on the keys; the texts of a group are in
the order of the inputs, separated by newlines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_ext.data.build.parts import Record
from megatron_ext.data.text.documents import EVERYTHING, Document, Fields, Piece, read_piece, too_long
from megatron_ext.data.text.parquet import row_group_sizes
from megatron_ext.data.text.sources import Source

SMALLEST, LARGEST, SHARDS = 1 << 20, 64 << 20, 1024
BUCKETS = 4096  # number of hash ranges, the finest division into GroupShards: the upper 12 bits of a hash
# hash (two halves, most significant first), file offset, and byte lengths of key, source and text
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("offset", "<i8"), ("key", "<i8"), ("source", "<i8"), ("text", "<i8")])


@dataclass(frozen=True)
class FileShard:
    """Pieces of one or more files.

    Attributes:
        size: approximate bytes of the inputs.
    """

    pieces: tuple[Piece, ...]
    size: int

    @property
    def identity(self) -> str:
        """Equal for equal documents."""
        return json.dumps([[str(p.source.path), p.source.size, p.source.mtime_ns, p.start, p.end] for p in self.pieces])

    def read(self, fields: Fields) -> Iterator[Document | str]:
        """Yield the documents, in order, and a line of text for each bad one."""
        for piece in self.pieces:
            yield from read_piece(piece, fields)
            piece.source.check_unchanged()  # a file that is still being written would be included only partly


@dataclass(frozen=True)
class GroupShard:
    """The groups whose hashes are in buckets [first, last), from all parts with texts.

    Attributes:
        size: approximate bytes of the texts.
    """

    parts: tuple[Path, ...]
    first: int
    last: int
    size: int

    @property
    def identity(self) -> str:
        """Equal for equal documents."""
        return json.dumps([[part.name for part in self.parts], self.first, self.last])

    def read(self, fields: Fields) -> Iterator[Document | str]:
        """Yield the joined texts of each group, and a line of text for each bad one."""
        of_parts = [_rows(part, self.first, self.last) for part in self.parts]
        rows = np.concatenate(of_parts)
        files = np.repeat(np.arange(len(of_parts)), [len(part) for part in of_parts])
        order = np.lexsort((rows["low"], rows["high"]))
        rows, files = rows[order], files[order]
        new = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
        borders = [0, *(np.flatnonzero(new) + 1).tolist(), len(rows)]
        for start, end in pairwise(borders):
            if start < end:
                yield self._group(rows[start:end], files[start:end], fields)

    def _group(self, rows: np.ndarray, files: np.ndarray, fields: Fields) -> Document | str:
        size = int(rows["text"].sum()) + len(rows) - 1
        texts, key, sources = [], "", set()
        for row, number in zip(rows, files, strict=True):
            with self.parts[number].with_suffix(".bin").open("rb") as file:
                file.seek(row["offset"])
                key = file.read(row["key"]).decode()
                sources.add(file.read(row["source"]).decode())
                if size <= fields.limit:
                    texts.append(file.read(row["text"]).decode())
        place = f"{fields.key} = {key!r}, {len(rows)} texts"
        if size > fields.limit:
            return f"{place}: {too_long(fields.limit)}"
        if len(sources) > 1:
            one, other, *_ = sorted(sources)
            return f"{place}: are of sources {one!r} and {other!r}, needs one source for each {fields.key}"
        return Document("\n".join(texts), self.parts[0].parent, key, sources.pop())


Shard = FileShard | GroupShard


def default_shard_bytes(sources: Sequence[Source]) -> int:
    """Return 1 to 64 MiB, which makes about a thousand shards except for very large inputs."""
    return min(max(sum(source.size for source in sources) // SHARDS, SMALLEST), LARGEST)


def cut(sources: Sequence[Source], fields: Fields, shard_bytes: int) -> list[Shard]:
    """Cut sources into shards of about `shard_bytes`, in order; small files are grouped, large ones are split.

    Raises:
        UserError: a .parquet file is damaged or lacks the columns of `fields`.
    """
    shards: list[Shard] = []
    pieces: list[Piece] = []
    size = 0
    for source in sources:
        for piece, piece_size in _pieces(source, fields, shard_bytes):
            pieces.append(piece)
            size += piece_size
            if size >= shard_bytes:
                shards.append(FileShard(tuple(pieces), size))
                pieces, size = [], 0
    return [*shards, FileShard(tuple(pieces), size)] if pieces else shards


def _pieces(source: Source, fields: Fields, shard_bytes: int) -> Iterator[tuple[Piece, int]]:
    if source.ending == ".parquet":
        start = size = 0
        sizes = row_group_sizes(source.path, fields.text, fields.keys)
        for end, added in enumerate(sizes, start=1):
            size += added
            if size >= shard_bytes or end == len(sizes):
                yield Piece(source, start, end), size
                start, size = end, 0
    elif source.is_stream or source.ending == ".txt":
        yield Piece(source, 0, EVERYTHING), source.size
    else:
        for start in range(0, source.size or 1, shard_bytes):
            end = min(start + shard_bytes, source.size)
            yield Piece(source, start, end), end - start


def write_texts(documents: Iterator[Document], file: BinaryIO, record: Record) -> np.ndarray:
    """Write texts to be grouped, and return their list, ROW [n], ordered by hash."""
    listed: list[tuple[int, int, int, int, int, int]] = []
    for document in documents:
        assert document.key is not None
        values = document.key.encode(), (document.source_name or "").encode(), document.text.encode()
        high, low = np.frombuffer(hashlib.sha256(values[0]).digest(), ">u8", 2).tolist()
        key, source, text = map(len, values)
        listed.append((high, low, record.size, key, source, text))
        file.writelines(values)
        record.size += key + source + text
    rows = np.array(listed, ROW)
    return rows[np.lexsort((rows["low"], rows["high"]))]  # stable, so a group keeps the order of the input


def _rows(part: Path, first: int, last: int) -> np.ndarray:
    """Return the rows of a part's texts in buckets [first, last)."""
    rows = np.load(part.with_suffix(".npy"), mmap_mode="r")
    start, end = np.searchsorted(rows["high"] >> np.uint64(52), (first, last))
    return np.array(rows[start:end])


def group(parts: Sequence[Path], shard_bytes: int) -> list[Shard]:
    """Return shards of about `shard_bytes` that together contain every group once."""
    total = sum(Record.read(part).size for part in parts)
    count = min(max(-(-total // shard_bytes), 1), BUCKETS)
    borders = [BUCKETS * number // count for number in range(count + 1)]
    return [GroupShard(tuple(parts), first, last, total // count) for first, last in pairwise(borders)]
