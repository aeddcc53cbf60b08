"""Find the sources of documents: files by suffix, folders, glob patterns and standard input.

paths --find_files--> files --Source.of--> Source(path, size, time of change)
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from megatron_ext.errors import UserError, missing_package

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
_ENDINGS = ", ".join(SUFFIXES[:-1]) + " or " + SUFFIXES[-1]
STDIN = "-"
BLOCK = 1 << 20
WORK_SUFFIX, LOCK_FILE = ".parts", "lock"  # for the folder of a data set that is being built, see `parts.WorkFolder`


@dataclass(frozen=True)
class Source:
    """A file in its state at the start of the work; standard input has the path "-".

    Attributes:
        size: bytes of the file (standard input: 0).
        mtime_ns: time of its last change (standard input: 0).
        label: its name in errors and metadata, if not its path.
    """

    path: Path
    size: int = 0
    mtime_ns: int = 0
    label: str | None = None

    @classmethod
    def of(cls, path: Path) -> Source:
        """Return the source for the current state of the file at `path`."""
        if str(path) == STDIN:
            return cls(path)
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    @property
    def ending(self) -> str:
        """Its suffix, one of SUFFIXES; standard input is treated as .jsonl."""
        return next((suffix for suffix in SUFFIXES if self.path.name.endswith(suffix)), ".jsonl")

    @property
    def name(self) -> str:
        """Its name in errors and metadata."""
        return self.label or ("standard input" if self.is_stdin else str(self.path))

    def copied(self, target: Path) -> Source:
        """Copy standard input to a .jsonl file, so that workers can share it."""
        with open_stream(self) as stream, target.open("wb") as file:
            shutil.copyfileobj(stream, file, BLOCK)
        status = target.stat()
        return Source(target, status.st_size, status.st_mtime_ns, self.name)

    @property
    def is_stdin(self) -> bool:
        return str(self.path) == STDIN

    @property
    def is_stream(self) -> bool:
        """Whether the file can only be read from the beginning, as lines of JSON."""
        return self.is_stdin or self.ending in (".jsonl.gz", ".jsonl.zst")

    def check_unchanged(self) -> None:
        """Raise UserError if the file has changed."""
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise UserError(f"{self.path} changed while it was read; start again once it stays as it is")

    def checksum(self) -> str:
        """Return the hexadecimal SHA-256 of the file."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest()


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that `paths` refer to, in order and without repeats; "-" is standard input.

    A folder stands for all files inside it with a known suffix, including those in linked folders, sorted by path. A
    pattern with *, ** or ? stands for its matches, with folders as above. A file reached by several links or matches is
    included once. Folders of unfinished data sets are skipped.

    Raises:
        UserError: no path, a path that does not exist, another kind of file, a folder or pattern without files, a file
            reached by two of the paths, or a file of an unfinished data set.
    """
    if not paths:
        raise UserError(f"input: got no path; name {_ENDINGS} files, folders of them, or - for standard input")
    # A file named twice would be in the data set twice, which would go unnoticed.
    taken: dict[Path, tuple[Path, int]] = {}  # by resolved path; the index of the path that led there
    for number, given in enumerate([os.fspath(path) for path in paths]):
        for file in _files_of(given):
            by = taken.setdefault(file.resolve(), (file, number))[1]
            if by != number:
                raise UserError(f"input: got {file} twice, by {paths[by]} and by {given}; name each file once")
    return [file for file, _ in taken.values()]


def _files_of(given: str) -> list[Path]:
    """Return the files that one path refers to."""
    path = Path(given)
    if given == STDIN:
        return [path]
    if work := _work_folder(path):
        raise UserError(f"input: {path} is work in progress of {work.with_suffix('')}; leave it out")
    if path.is_file() and path.name.endswith(SUFFIXES):
        return [path]
    if path.is_dir():
        found, leads = _inside(path), f"folder {path} holds"
    elif path.exists():
        raise UserError(f"input: {path} is no {_ENDINGS} file; convert it, or rename it if it is one")
    elif glob.has_magic(given):
        matches = map(Path, glob.glob(given, recursive=True))
        found = [file for match in matches for file in (_inside(match) if match.is_dir() else [match])]
        leads = f"pattern {given} matches"
    else:
        raise UserError(f"input: {path} does not exist; check the path")
    known = {file for file in found if file.name.endswith(SUFFIXES) and file.is_file() and not _work_folder(file)}
    if not known:
        raise UserError(f"input: {leads} no {_ENDINGS} file; name another one")
    return sorted(known, key=lambda file: file.parts)


def _inside(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:  # os.walk ignores errors by default
        raise error

    found: list[Path] = []
    entered = set(folder.resolve().parents)  # a link to one of them is a loop
    for name, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        real = Path(name).resolve()
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders.sort()
        found += [Path(name, file) for file in files]
    return found


def _work_folder(path: Path) -> Path | None:
    """Return the folder of an unfinished data set that is, or contains, `path`; None if there is none."""
    folders = (path, *path.parents)
    return next((folder for folder in folders if folder.suffix == WORK_SUFFIX and (folder / LOCK_FILE).is_file()), None)


@contextmanager
def open_stream(source: Source) -> Iterator[BinaryIO]:
    """Open a stream of lines, decompressed.

    Raises:
        UserError: compressed data is damaged or truncated.
    """
    if source.is_stdin:
        yield sys.stdin.buffer
        return
    # EOFError: truncated data. The others: the content does not match the suffix.
    damages: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        if source.ending == ".jsonl.gz":
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
    """Yield the lines that begin in bytes [start, end) of a file, without their newlines.

    A line longer than `limit` is truncated to limit + 1 bytes, which bounds memory and still shows that it is too long.
    """
    position = 0
    if start:
        file.seek(start - 1)  # include the newline before a line that begins at `start`
        position = start - 1 + _skip_line(file, end - start + 1)
    while position < end and (line := file.readline(limit + 1)):
        position += len(line)
        if not line.endswith(b"\n"):
            position += _skip_line(file, end - position)
        yield line.removesuffix(b"\n")


def _skip_line(file: BinaryIO, at_most: int) -> int:
    """Skip the rest of a line, or at most `at_most` bytes of it plus a block; return the number of bytes skipped.

    If a line spans many shards, each of them reads only its own bytes of it.
    """
    length = 0
    while length < at_most and (part := file.readline(BLOCK)):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def count_lines(path: Path, end: int) -> int:
    """Return the number of lines of a file that begin before byte `end`."""
    if not end:
        return 0
    newlines, left = 0, end - 1  # a newline at end - 1 begins a line at `end`
    with path.open("rb") as file:
        while left and (block := file.read(min(left, BLOCK))):
            newlines += block.count(b"\n")
            left -= len(block)
    return newlines + 1


class _Zstandard(io.RawIOBase):
    """Decompresses consecutive frames, and raises EOFError if the last is truncated, unlike zstandard's own reader.

    `decompress` returns the whole content of its input at once. Blocks of zstd have at least 4 bytes and expand to at
    most 128 KB, so INPUT bytes expand to at most 32 MB.
    """

    INPUT = 1024

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
            block = block or self._raw.read(self.INPUT)
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
