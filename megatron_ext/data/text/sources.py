"""Where documents come from: files by their endings, folders, glob patterns and standard input.

paths --find_files--> files --Source.of--> Source(path, size, time of change)
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from megatron_ext.data.text.tokenizer_kinds import missing_package
from megatron_ext.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
STDIN = "-"
BLOCK = 1 << 20
WORK_SUFFIX, LOCK_FILE = ".parts", "lock"  # of the folder of a dataset in the making, see `parts.WorkFolder`


@dataclass(frozen=True)
class Source:
    """A file as it was when the work began; standard input has the path "-".

    Attributes:
        size: bytes of the file (standard input: 0).
        mtime_ns: when it was last changed (standard input: 0).
    """

    path: Path
    size: int = 0
    mtime_ns: int = 0

    @classmethod
    def of(cls, path: Path) -> Source:
        """The file at `path` as it is now."""
        if str(path) == STDIN:
            return cls(path)
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    @property
    def kind(self) -> str:
        """Its ending, one of SUFFIXES; standard input holds lines of JSON."""
        return next((suffix for suffix in SUFFIXES if self.path.name.endswith(suffix)), ".jsonl")

    @property
    def name(self) -> str:
        """What errors call it."""
        return "standard input" if self.is_stdin else str(self.path)

    @property
    def is_stdin(self) -> bool:
        return str(self.path) == STDIN

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read from its beginning, as lines of JSON."""
        return self.is_stdin or self.kind in (".jsonl.gz", ".jsonl.zst")

    def check_unchanged(self) -> None:
        """
        Raises:
            UserError: the file is no longer what it was.
        """
        if Source.of(self.path) != self:
            raise UserError(f"{self.path} changed while it was read; start again once it stays as it is")

    def checksum(self) -> str:
        """Hexadecimal SHA-256 of the file."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest()


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that `paths` lead to, in their order, each once; "-" is standard input.

    Of a folder: all inside it and the folders that it links to, whose ending is known, sorted by their path. Of a
    pattern with *, ** or ?: what matches, sorted, folders as above. A file that several links of a folder or
    matches of a pattern lead to is taken once. Folders of datasets in the making are passed over.

    Raises:
        UserError: no path, one that does not exist, another kind of file, a folder or pattern without any, a file
            that two of the paths lead to, one of a dataset in the making.
    """
    if not paths:
        raise UserError(f"input: got no path; name {_KINDS} files, folders of them, or - for standard input")
    taken: dict[Path, tuple[Path, str]] = {}  # by what they are behind all links, and which path led there
    for given in [os.fspath(path) for path in paths]:
        for file in _found(given):
            earlier, by = taken.setdefault(file.resolve(), (file, given))
            if earlier is not file:
                raise UserError(f"input: got {file} twice, by {by} and by {given}; name each file once")
    return [file for file, _ in taken.values()]


def _found(given: str) -> list[Path]:
    """The files that one path leads to."""
    path = Path(given)
    if given == STDIN:
        return [path]
    if work := _work_folder(path):
        raise UserError(f"input: {path} is work in progress of {work.with_suffix('')}; leave it out")
    if path.is_file() and _is_known(path):
        return [path]
    if path.is_dir():
        return _inside(path) or _none(f"folder {path} holds")
    if path.exists():
        raise UserError(f"input: {path} is no {_KINDS} file; convert it, or rename it if it is one")
    if glob.has_magic(given):
        return _matching(given) or _none(f"pattern {given} matches")
    raise UserError(f"input: {path} does not exist; check the path")


_KINDS = ", ".join(SUFFIXES[:-1]) + " or " + SUFFIXES[-1]


def _none(what: str) -> list[Path]:
    raise UserError(f"input: {what} no {_KINDS} file; name another one")


def _is_known(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _work_folder(path: Path) -> Path | None:
    """The folder of a dataset in the making that `path` is or lies in."""
    candidates = (path, *path.parents)
    return next((one for one in candidates if one.suffix == WORK_SUFFIX and (one / LOCK_FILE).is_file()), None)


def _inside(folder: Path) -> list[Path]:
    found: list[Path] = []
    entered = set(folder.resolve().parents)  # a link to one of them is a loop
    for name, folders, files in os.walk(folder, followlinks=True, onerror=_tell):
        here = Path(name)
        real = here.resolve()
        if real in entered or _work_folder(here):
            folders.clear()
            continue
        entered.add(real)
        folders.sort()
        found += [file for file in map(here.joinpath, files) if _is_known(file) and file.is_file()]
    return _once(found)


def _tell(error: OSError) -> None:
    """Of a folder that cannot be read, which os.walk would pass over."""
    raise UserError(f"input: {error.filename}: {error.strerror}; make it readable, or name the others") from None


def _matching(pattern: str) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, glob.glob(pattern, recursive=True)):
        if path.is_dir():  # ** meets a folder and what is inside
            found += _inside(path)
        elif _is_known(path) and path.is_file() and not _work_folder(path):
            found.append(path)
    return _once(found)


def _once(files: Sequence[Path]) -> list[Path]:
    """Each file by the shortest of the paths to it, sorted by their folders."""
    found: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: (len(file.parts), file.parts)):
        found.setdefault(file.resolve(), file)
    return sorted(found.values(), key=lambda file: file.parts)


@contextmanager
def open_stream(source: Source) -> Iterator[BinaryIO]:
    """The bytes of a stream, decompressed.

    Raises:
        UserError: compressed data that is damaged or cut off.
    """
    if source.is_stdin:
        yield sys.stdin.buffer
        return
    # EOFError: the data ends too early. The others: it is not what the ending says.
    damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        if source.kind == ".jsonl.gz":
            with gzip.open(source.path, "rb") as stream:
                yield cast(BinaryIO, stream)
            return
        try:
            import zstandard
        except ImportError:
            raise missing_package(str(source.path), "zstandard") from None
        damages += (zstandard.ZstdError,)
        with source.path.open("rb") as raw, io.BufferedReader(_Zstandard(raw), BLOCK) as decompressed:
            yield decompressed
    except damages as error:
        raise UserError(f"{source.path}: damaged or cut off ({error}); make it again") from None


def read_lines(file: BinaryIO, start: int, end: int, limit: int) -> Iterator[bytes]:
    """The lines that begin in bytes [start, end) of a file, without their newlines.

    Of a line longer than `limit`, its first limit + 1 bytes: so memory is bounded, and it is still seen to be
    too long.
    """
    position = 0
    if start:
        file.seek(start - 1)  # the line that begins at `start` follows a newline there
        position = start - 1 + _skip_line(file, end - start + 1)
    while position < end and (line := file.readline(limit + 1)):
        position += len(line)
        if not line.endswith(b"\n"):
            position += _skip_line(file, end - position)
        yield line.removesuffix(b"\n")


def _skip_line(file: BinaryIO, at_most: int) -> int:
    """Pass over the rest of a line, or `at_most` bytes of it and a block; the bytes passed over.

    Where a line spans many shards, each of them reads its own bytes of it alone.
    """
    length = 0
    while length < at_most and (part := file.readline(BLOCK)):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def count_lines(path: Path, end: int) -> int:
    """The lines of a file that begin before byte `end`."""
    if not end:
        return 0
    newlines, left = 0, end - 1  # a newline at end - 1 begins a line at `end`
    with path.open("rb") as file:
        while left and (block := file.read(min(left, BLOCK))):
            newlines += block.count(b"\n")
            left -= len(block)
    return newlines + 1


class _Zstandard(io.RawIOBase):
    """Decompresses, one frame after another, and tells where the last is cut off: zstandard's own reader does not."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            block = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = self._decompressor.decompressobj(), False
            block = block or self._raw.read(1 << 16)
            if not block:
                if self._begun:
                    raise EOFError("its last frame has no end")
                return 0
            self._begun = True
            self._ready = memoryview(self._frame.decompress(block))
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
