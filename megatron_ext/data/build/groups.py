"""Join the documents of each group, such as all files of a repository or all chapters of a book, in bounded memory.

    shards --SpillJob, in parallel--> texts on disk, listed by a hash of their group's key
           --GroupShard, one per range of hashes--> each group's texts, joined

Groups are ordered by the hash of their keys, a fixed shuffle that depends only on the keys; the texts of a group are in
the order of the inputs, separated by newlines.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_ext.data.build.encode import Task
from megatron_ext.data.build.parts import Part, Record
from megatron_ext.data.build.shards import Shard
from megatron_ext.data.text.documents import Document, Fields, Problem, ReadProgress, keep_good, too_long
from megatron_ext.data.text.sources import BLOCK, Source
from megatron_ext.files.atomic import atomic_write

BUCKETS = 4096  # number of hash ranges, the finest division into GroupShards: the upper 12 bits of a hash
SEPARATOR = "\n"
HASH = struct.Struct(">QQ")
# hash (two halves, most significant first), file offset, and byte lengths of key, source and text
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("offset", "<i8"), ("key", "<i8"), ("source", "<i8"), ("text", "<i8")])


@dataclass(frozen=True)
class SpillJob:
    """Writes a shard's texts to disk for grouping, as a part, when called."""

    task: Task
    shard: Shard

    @property
    def part(self) -> Part:
        return Part.named(self.task.folder, self.task.settings, "texts with sources", self.shard.identity)

    def __call__(self) -> None:
        progress, record = ReadProgress(), Record(limit=self.task.fields.limit)
        listed: list[tuple[int, int, int, int, int, int]] = []
        with atomic_write(self.part.content) as aside, aside.open("wb", BLOCK) as file:
            for document in keep_good(self.shard.read(self.task.fields), self.task.skip, progress):
                assert document.key is not None
                values = document.key.encode(), (document.source_name or "").encode(), document.text.encode()
                high, low = HASH.unpack(hashlib.sha256(values[0]).digest()[: HASH.size])
                key, source, text = map(len, values)
                listed.append((high, low, record.size, key, source, text))
                file.writelines(values)
                record.size += key + source + text
        rows = np.array(listed, ROW)
        rows = rows[np.lexsort((rows["low"], rows["high"]))]  # stable, so a group keeps the order of the input
        with atomic_write(self.part.rows) as aside, aside.open("wb") as file:
            np.save(file, rows)
        record.read(progress, self.shard.sources)
        self.part.finish(record)


@dataclass(frozen=True)
class GroupShard:
    """The groups whose hashes are in buckets [first, last), from all spilled parts.

    Attributes:
        field: the name of the key, for errors.
        size: approximate bytes of their texts.
    """

    folder: Path
    spills: tuple[str, ...]
    field: str
    first: int
    last: int
    size: int

    @property
    def identity(self) -> str:
        return json.dumps([self.spills, self.first, self.last])

    @property
    def sources(self) -> list[Source]:
        return []  # their checksums were computed when they were read

    def read(self, fields: Fields) -> Iterator[Document | Problem]:
        spilled = [_rows(Part(self.folder, name), self.first, self.last) for name in self.spills]
        rows = np.concatenate(spilled)
        files = np.repeat(np.arange(len(spilled)), [len(part) for part in spilled])
        order = np.lexsort((rows["low"], rows["high"]))
        rows, files = rows[order], files[order]
        new = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
        borders = [0, *(np.flatnonzero(new) + 1).tolist(), len(rows)]
        for start, end in pairwise(borders):
            if start < end:
                yield self._group(rows[start:end], files[start:end], fields.limit)

    def _group(self, rows: np.ndarray, files: np.ndarray, limit: int) -> Document | Problem:
        size = int(rows["text"].sum()) + (len(rows) - 1) * len(SEPARATOR)
        texts, key, sources = [], "", set()
        for row, number in zip(rows, files, strict=True):
            with Part(self.folder, self.spills[number]).content.open("rb") as file:
                file.seek(row["offset"])
                key = file.read(row["key"]).decode()
                sources.add(file.read(row["source"]).decode())
                if size > limit:
                    return Problem(f"{self.field} = {key!r}, {len(rows)} texts", *too_long(limit))
                texts.append(file.read(row["text"]).decode())
        if len(sources) > 1:
            one, other, *_ = sorted(sources)
            remedy = f"name one source for each {self.field}"
            return Problem(
                f"{self.field} = {key!r}, {len(rows)} texts", f"are of sources {one!r} and {other!r}", remedy
            )
        return Document(SEPARATOR.join(texts), self.folder, None, key, size, source_name=sources.pop())


def _rows(part: Part, first: int, last: int) -> np.ndarray:
    """Return the rows of a part's texts in buckets [first, last)."""
    rows = np.load(part.rows, mmap_mode="r")
    start, end = np.searchsorted(rows["high"] >> np.uint64(52), (first, last))
    return np.array(rows[start:end])


def group(spills: Sequence[Part], folder: Path, field: str, shard_bytes: int) -> list[GroupShard]:
    """Return shards of about `shard_bytes` that together contain every group once."""
    total = sum(part.record().size for part in spills)
    count = min(max(-(-total // shard_bytes), 1), BUCKETS)
    names = tuple(part.name for part in spills)
    borders = [BUCKETS * number // count for number in range(count + 1)]
    return [GroupShard(folder, names, field, first, last, total // count) for first, last in pairwise(borders)]
