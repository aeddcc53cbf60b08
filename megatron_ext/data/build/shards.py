"""Cut the inputs into shards, the unit of work and of resuming.

The cuts depend only on the files, so the data set does not depend on the number of workers. Large .jsonl and .parquet
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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_ext.data.text.documents import Document, Fields, Refuse, read_range, too_long
from megatron_ext.data.text.parquet import row_group_sizes
from megatron_ext.data.text.sources import FileRange

SMALLEST, LARGEST, SHARDS = 1 << 20, 64 << 20, 1024
BUCKETS = 4096  # number of hash ranges, the finest division into GroupShards: the upper 12 bits of a hash
# hash (two halves, most significant first), file offset, and byte lengths of key, source and text
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("offset", "<i8"), ("key", "<i8"), ("source", "<i8"), ("text", "<i8")])


@dataclass(frozen=True)
class FileShard:
    """Files, or parts of them.

    Attributes:
        size: approximate bytes of the inputs.
    """

    files: tuple[FileRange, ...]
    size: int

    @property
    def identity(self) -> str:
        """Equal for equal documents."""
        return json.dumps([[str(f.path), f.size, f.mtime_ns, f.start, f.end] for f in self.files])

    def read(self, fields: Fields, refuse: Refuse) -> Iterator[Document]:
        """Yield the documents, in order; call `refuse` with a line of text for each bad one."""
        for file in self.files:
            yield from read_range(file, fields, refuse)
            file.check_unchanged()  # a file that is still being written would be included only partly


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

    def read(self, fields: Fields, refuse: Refuse) -> Iterator[Document]:
        """Yield the joined texts of each group; call `refuse` with a line of text for each bad one."""
        of_parts = [_rows(part, self.first, self.last) for part in self.parts]
        rows = np.concatenate(of_parts)
        files = np.repeat(np.arange(len(of_parts)), [len(part) for part in of_parts])
        order = np.lexsort((rows["low"], rows["high"]))
        rows, files = rows[order], files[order]
        new = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
        borders = [0, *(np.flatnonzero(new) + 1).tolist(), len(rows)]
        for start, end in pairwise(borders):
            if start < end:
                yield from self._group(rows[start:end], files[start:end], fields, refuse)

    def _group(self, rows: np.ndarray, files: np.ndarray, fields: Fields, refuse: Refuse) -> Iterator[Document]:
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
            refuse(f"{place}: {too_long(fields.limit)}")
        elif len(sources) > 1:
            one, other, *_ = sorted(sources)
            refuse(f"{place}: are of sources {one!r} and {other!r}, needs one source for each {fields.key}")
        else:
            source = None if fields.source is None else sources.pop()
            yield Document("\n".join(texts), self.parts[0].parent, key, source)


Shard = FileShard | GroupShard


def default_shard_bytes(files: Sequence[FileRange]) -> int:
    """Return 1 to 64 MiB, which makes about a thousand shards except for very large inputs."""
    return min(max(sum(file.size for file in files) // SHARDS, SMALLEST), LARGEST)


def cut(files: Sequence[FileRange], fields: Fields, shard_bytes: int) -> list[Shard]:
    """Cut files into shards of about `shard_bytes`, in order; small files are grouped, large ones are split.

    Raises:
        UserError: a .parquet file is damaged or lacks the columns of `fields`.
    """
    shards: list[Shard] = []
    taken: list[FileRange] = []
    size = 0
    for file in files:
        for part, part_size in _parts(file, fields, shard_bytes):
            taken.append(part)
            size += part_size
            if size >= shard_bytes:
                shards.append(FileShard(tuple(taken), size))
                taken, size = [], 0
    return [*shards, FileShard(tuple(taken), size)] if taken else shards


def _parts(file: FileRange, fields: Fields, shard_bytes: int) -> Iterator[tuple[FileRange, int]]:
    if file.ending == ".parquet":
        start = size = 0
        sizes = row_group_sizes(file, fields.columns)
        for end, added in enumerate(sizes, start=1):
            size += added
            if size >= shard_bytes or end == len(sizes):
                yield replace(file, start=start, end=end), size
                start, size = end, 0
    elif file.ending == ".jsonl":
        for start in range(0, file.size or 1, shard_bytes):
            end = min(start + shard_bytes, file.size)
            yield replace(file, start=start, end=end), end - start
    else:
        yield file, file.size


def write_texts(documents: Iterator[Document], file: BinaryIO) -> dict[str, np.ndarray]:
    """Write texts to be grouped, and return their list, ROW [n], ordered by hash."""
    listed: list[tuple[int, int, int, int, int, int]] = []
    for document in documents:
        assert document.key is not None
        values = document.key.encode(), (document.source_name or "").encode(), document.text.encode()
        high, low = np.frombuffer(hashlib.sha256(values[0]).digest(), ">u8", 2).tolist()
        key, source, text = map(len, values)
        listed.append((high, low, file.tell(), key, source, text))
        file.writelines(values)
    rows = np.array(listed, ROW)
    return {"rows": rows[np.lexsort((rows["low"], rows["high"]))]}  # stable, so a group keeps the order of the input


def _rows(part: Path, first: int, last: int) -> np.ndarray:
    """Return the rows of a part's texts in buckets [first, last)."""
    with np.load(part.with_suffix(".npz")) as arrays:
        rows = arrays["rows"]
    start, end = np.searchsorted(rows["high"] >> np.uint64(52), (first, last))
    return rows[start:end].copy()


def group(parts: Sequence[Path], shard_bytes: int) -> list[Shard]:
    """Return shards of about `shard_bytes` that together contain every group once."""
    total = sum(part.with_suffix(".bin").stat().st_size for part in parts)
    count = min(max(-(-total // shard_bytes), 1), BUCKETS)
    borders = [BUCKETS * number // count for number in range(count + 1)]
    return [GroupShard(tuple(parts), first, last, total // count) for first, last in pairwise(borders)]
