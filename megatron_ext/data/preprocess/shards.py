"""Cut the inputs into shards, the unit of work and of resuming.

The cuts depend only on the files, so the data set does not depend on the number of workers. Large .jsonl and .parquet
files are cut into parts; a compressed file is one shard, because it can only be read from the beginning.

To join the documents of each group (all files of a repository, all chapters of a book) in bounded memory, the texts are
first written to disk, listed by a hash of their group's key, and then read again by ranges of hashes:

    FileShards --in parallel--> texts on disk --group--> GroupShards, each with whole groups

Groups are ordered by the hash of their keys, a fixed shuffle that depends only on the keys; the texts of a group are in
the order of the inputs, separated by newlines.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_ext.data.text.documents import Document, Fields, FileRange, Refuse, read_range, row_group_sizes, too_long

BUCKETS = 1 << 16  # number of hash ranges, the finest division into GroupShards
# of a text: the first 2 bytes of its group's hash, the first 16, and its position in the part's file
ROW = np.dtype([("bucket", "<u2"), ("hash", "S16"), ("offset", "<i8")])


@dataclass(frozen=True)
class FileShard:
    """Files, or parts of them; `size` is approximate, in bytes."""

    files: tuple[FileRange, ...]
    size: int

    def read(self, fields: Fields, refuse: Refuse) -> Iterator[Document]:
        """Yield the documents, in order; call `refuse` with a line of text for each bad one."""
        for file in self.files:
            yield from read_range(file, fields, refuse)
            file.check_unchanged()  # a file that is still being written would be included only partly


@dataclass(frozen=True)
class GroupShard:
    """The groups in buckets [first, last), from all parts with texts; `size` is approximate, in bytes."""

    parts: tuple[Path, ...]
    first: int
    last: int
    size: int

    def read(self, fields: Fields, refuse: Refuse) -> Iterator[Document]:
        by_part = []
        for part in self.parts:
            with np.load(part.with_suffix(".npz")) as arrays:
                rows = arrays["rows"]
            start, end = np.searchsorted(rows["bucket"], (self.first, self.last))
            by_part.append(rows[start:end].copy())
        rows = np.concatenate(by_part)
        if not len(rows):
            return
        files = np.repeat(np.arange(len(by_part)), list(map(len, by_part)))
        order = np.argsort(rows["hash"], kind="stable")
        rows = rows[order]
        files = files[order]
        hashes = rows["hash"]
        borders = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
        for start, end in pairwise([0, *borders.tolist(), len(rows)]):
            offsets = rows["offset"][start:end]
            yield from self._group(files[start:end].tolist(), offsets.tolist(), fields, refuse)

    def _group(self, files: list[int], offsets: list[int], fields: Fields, refuse: Refuse) -> Iterator[Document]:
        texts: list[str] = []
        sources: set[str | None] = set()
        size = -1
        for number, offset in zip(files, offsets, strict=True):
            with self.parts[number].with_suffix(".bin").open("rb") as file:
                file.seek(offset)
                key, source, text = json.loads(file.readline())
            texts.append(text)
            sources.add(source)
            size += len(text.encode()) + 1
            if size > fields.limit:
                break
        place = f"{fields.key} = {key!r}, {len(files)} texts"
        if size > fields.limit:
            refuse(f"{place}: {too_long(fields.limit)}")
        elif len(sources) > 1:
            first, second, *_ = sorted(map(str, sources))
            refuse(f"{place}: are of sources {first!r} and {second!r}, needs one source for each {fields.key}")
        else:
            yield Document("\n".join(texts), self.parts[0].parent, key, source)


Shard = FileShard | GroupShard


def cut(files: Sequence[FileRange], fields: Fields, shard_bytes: int) -> list[Shard]:
    """Cut files into shards of about `shard_bytes`, in order; small files are grouped, large ones are split."""
    shards: list[Shard] = []
    waiting: list[FileRange] = []
    size = 0
    for file in files:
        for part, part_size in _parts(file, fields, shard_bytes):
            waiting.append(part)
            size += part_size
            if size >= shard_bytes:
                shards.append(FileShard(tuple(waiting), size))
                waiting = []
                size = 0
    if waiting:
        shards.append(FileShard(tuple(waiting), size))
    return shards


def _parts(file: FileRange, fields: Fields, shard_bytes: int) -> Iterator[tuple[FileRange, int]]:
    if file.ending == ".parquet":
        start = size = 0
        sizes = row_group_sizes(file, fields.columns)
        for end, added in enumerate(sizes, start=1):
            size += added
            if size >= shard_bytes or end == len(sizes):
                yield replace(file, start=start, end=end), size
                start = end
                size = 0
    elif file.ending == ".jsonl":
        for start in range(0, file.size or 1, shard_bytes):
            end = min(start + shard_bytes, file.size)
            yield replace(file, start=start, end=end), end - start
    else:
        yield file, file.size


def write_texts(documents: Iterator[Document], file: BinaryIO) -> tuple[dict[str, np.ndarray], int]:
    """Write the texts that are not empty, one a line; return a list, ROW [n], by hash, and the number of empty ones."""
    rows = []
    empty = 0
    for document in documents:
        if not document.text:
            empty += 1
            continue
        assert document.key is not None
        digest = hashlib.sha256(document.key.encode()).digest()
        bucket = int.from_bytes(digest[:2], "big")
        rows.append((bucket, digest[:16], file.tell()))
        line = json.dumps([document.key, document.source_name, document.text])
        file.write(line.encode() + b"\n")
    table = np.array(rows, ROW)
    table = table[np.argsort(table["hash"], kind="stable")]  # stable: a group keeps the order of the input
    return {"rows": table}, empty


def group(parts: Sequence[Path], shard_bytes: int) -> list[Shard]:
    """Return shards of about `shard_bytes` that together contain every group once."""
    total = sum(part.with_suffix(".bin").stat().st_size for part in parts)
    count = -(-total // shard_bytes)
    count = min(max(count, 1), BUCKETS)
    borders = [BUCKETS * number // count for number in range(count + 1)]
    return [GroupShard(tuple(parts), first, last, total // count) for first, last in pairwise(borders)]
