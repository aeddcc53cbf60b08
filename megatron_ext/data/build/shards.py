"""Sources cut into shards: the unit of work, of resuming, and of order.

How they are cut depends on the sources alone, so the dataset does not depend on the number of workers. Files
and large parts of files are read where they lie; a stream (standard input, .gz, .zst) is copied, a shard at
a time, and the copies are removed when they are done with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from megatron_ext.data.text.card import Card
from megatron_ext.data.text.documents import Document, Fields, Piece, Problem, read_piece
from megatron_ext.data.text.parquet import row_group_sizes
from megatron_ext.data.text.sources import BLOCK, Source, open_stream

SMALLEST, LARGEST, SHARDS = 1 << 20, 64 << 20, 1024
STREAM_SHARD = 8 << 20  # of standard input, whose size is unknown
UNPACKED = 4  # text takes about four times the bytes of its compressed file


class Shard(Protocol):
    """Holds documents that are worked on together.

    Attributes:
        identity: what they are, as text: the same one stands for the same documents.
        sources: the files that begin in this shard; whoever works on it takes their checksums.
        size: bytes of the inputs, about.
    """

    @property
    def identity(self) -> str: ...

    @property
    def sources(self) -> list[Source]: ...

    @property
    def size(self) -> int: ...

    def read(self, fields: Fields) -> Iterator[Document | Problem]: ...

    def clear(self) -> None:
        """Remove what was made only to be read by this shard."""


@dataclass(frozen=True)
class FileShard:
    """Holds pieces of one or many files."""

    pieces: tuple[Piece, ...]
    size: int

    @property
    def identity(self) -> str:
        parts = [
            [piece.source.name, piece.source.size, piece.source.mtime_ns, piece.start, piece.end]
            for piece in self.pieces
        ]
        return json.dumps(parts)

    @property
    def sources(self) -> list[Source]:
        return [piece.source for piece in self.pieces if piece.start == 0 and not piece.source.is_stdin]

    def read(self, fields: Fields) -> Iterator[Document | Problem]:
        for piece in self.pieces:
            yield from read_piece(piece, fields)
            if not piece.source.is_stdin:  # a file that is still written would be in the dataset by halves
                piece.source.check_unchanged()

    def clear(self) -> None:
        for piece in self.pieces:
            if piece.copy is not None:
                piece.copy.unlink(missing_ok=True)


def default_shard_bytes(sources: Sequence[Source]) -> int:
    """Choose a power of two, 1 to 64 MiB, that makes at most about a thousand shards of all but very large inputs."""
    if any(source.is_stdin for source in sources):
        return STREAM_SHARD
    total = sum(source.size * (UNPACKED if source.is_stream else 1) for source in sources)
    size = SMALLEST
    while size < LARGEST and size * SHARDS < total:
        size *= 2
    return size


class Cutter:
    """Cuts sources into shards of about `shard_bytes` of text.

    Attributes:
        stdin: what the card says of standard input, once it has been read to its end.
    """

    def __init__(self, fields: Fields, shard_bytes: int, folder: Path) -> None:
        self.stdin: Card | None = None
        self._fields = fields
        self._shard_bytes = shard_bytes
        self._folder = folder
        self._copies = 0

    def cut(self, sources: Sequence[Source]) -> Iterator[FileShard]:
        """Yield the shards, in order: small files together, large ones in parts.

        Raises:
            UserError: a .parquet file without the columns, damaged compressed data, a file that changes.
        """
        pieces: list[Piece] = []
        size = 0
        for source in sources:
            for piece, piece_size in self._pieces(source):
                pieces.append(piece)
                size += piece_size
                if size >= self._shard_bytes:
                    yield FileShard(tuple(pieces), size)
                    pieces, size = [], 0
        if pieces:
            yield FileShard(tuple(pieces), size)

    def _pieces(self, source: Source) -> Iterator[tuple[Piece, int]]:
        if source.is_stream:
            yield from self._copied(source)
        elif source.ending == ".parquet":
            sizes = row_group_sizes(source.path, self._fields.text, self._fields.keys)
            start = size = 0
            for end, added in enumerate(sizes, start=1):
                size += added
                if size >= self._shard_bytes or end == len(sizes):
                    yield Piece(source, start, end), size
                    start, size = end, 0
        elif source.ending == ".txt":
            yield Piece(source, 0, source.size), source.size
        else:
            for start in range(0, source.size or 1, self._shard_bytes):
                end = min(start + self._shard_bytes, source.size)
                yield Piece(source, start, end, lines_before=None if start else 0), end - start

    def _copied(self, source: Source) -> Iterator[tuple[Piece, int]]:
        """Copy whole lines of a stream, each piece into a file of its own: workers cannot share a stream."""
        start = lines = 0
        digest = hashlib.sha256()
        with open_stream(source) as stream:
            while True:
                copy = self._folder / f"copy-{self._copies}.jsonl"
                self._copies += 1
                with copy.open("wb") as file:
                    size, newlines = _copy_lines(stream, file, self._shard_bytes, digest)
                if not size and start:
                    copy.unlink()
                    break
                yield Piece(source, start, start + size, copy, lines), size
                start, lines = start + size, lines + newlines
                if not size:
                    break
        if source.is_stdin:
            self.stdin = {"path": source.name, "bytes": start, "sha256": digest.hexdigest()}
        else:
            source.check_unchanged()


def _copy_lines(stream: BinaryIO, file: BinaryIO, at_least: int, digest: hashlib._Hash) -> tuple[int, int]:
    """Copy `at_least` bytes and the rest of the line begun; return the bytes and the newlines copied."""
    size = newlines = 0
    while True:
        block = stream.read(min(BLOCK, at_least - size)) if size < at_least else stream.readline(BLOCK)
        file.write(block)
        digest.update(block)
        size += len(block)
        newlines += block.count(b"\n")
        if not block or (size >= at_least and block.endswith(b"\n")):
            return size, newlines
