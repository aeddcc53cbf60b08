"""Cut sources into shards, the unit of work and of resuming.

The cuts depend only on the sources, so the data set does not depend on the number of workers. Large .jsonl and .parquet
files are cut into parts; a compressed file is one shard, because it can only be read from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.data.text.documents import EVERYTHING, Document, Fields, Piece, Problem, read_piece
from megatron_ext.data.text.parquet import row_group_sizes
from megatron_ext.data.text.sources import Source

SMALLEST, LARGEST, SHARDS = 1 << 20, 64 << 20, 1024


class Shard(Protocol):
    """Documents that one job reads.

    Attributes:
        identity: equal for equal documents.
        sources: the files that begin in this shard; the job computes their checksums.
        size: approximate bytes of the inputs.
    """

    @property
    def identity(self) -> str: ...

    @property
    def sources(self) -> list[Source]: ...

    @property
    def size(self) -> int: ...

    def read(self, fields: Fields) -> Iterator[Document | Problem]: ...


@dataclass(frozen=True)
class FileShard:
    """Pieces of one or more files."""

    pieces: tuple[Piece, ...]
    size: int

    @property
    def identity(self) -> str:
        return json.dumps([[p.source.name, p.source.size, p.source.mtime_ns, p.start, p.end] for p in self.pieces])

    @property
    def sources(self) -> list[Source]:
        return [piece.source for piece in self.pieces if piece.start == 0]

    def read(self, fields: Fields) -> Iterator[Document | Problem]:
        for piece in self.pieces:
            yield from read_piece(piece, fields)
            piece.source.check_unchanged()  # a file that is still being written would be included only partly


def default_shard_bytes(sources: Sequence[Source]) -> int:
    """Return a power of two, 1 to 64 MiB, that makes about a thousand shards except for very large inputs."""
    total = sum(source.size for source in sources)
    size = SMALLEST
    while size < LARGEST and size * SHARDS < total:
        size *= 2
    return size


def cut(sources: Sequence[Source], fields: Fields, shard_bytes: int) -> list[FileShard]:
    """Cut sources into shards of about `shard_bytes`, in order; small files are grouped, large ones are split.

    Raises:
        UserError: a .parquet file is damaged or lacks the columns of `fields`.
    """
    shards: list[FileShard] = []
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
