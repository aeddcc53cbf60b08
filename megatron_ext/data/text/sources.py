"""Find the files of documents: by suffix, in folders and by patterns; and read their lines or rows."""

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_ext.errors import UserError, first_line, missing_package

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
BLOCK = 1 << 20
ROWS_AT_ONCE = 64  # of a .parquet file
EVERYTHING = 2**63  # larger than any file


@dataclass(frozen=True)
class FileRange:
    """A file in its state at the start of the work, or a part of it.

    `start` and `end` are for a .jsonl file the byte range in which the part's lines begin, for a .parquet file the
    range of row groups; a .txt file or a stream is always complete. `size` is that of the whole file, in bytes.
    """

    path: Path
    size: int
    mtime_ns: int
    start: int = 0
    end: int = EVERYTHING

    @classmethod
    def of(cls, path: Path) -> "FileRange":
        """Return the whole file at `path` in its current state."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    @property
    def ending(self) -> str:
        return next(suffix for suffix in SUFFIXES if self.path.name.endswith(suffix))

    def check_unchanged(self) -> None:
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise UserError(f"{self.path} changed while it was read; start again once it stays as it is")


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that `paths` refer to, each once, in order.

    A folder stands for all files inside it with a known suffix, including those in linked folders, sorted by path. A
    pattern with *, ** or ? stands for its matches, with folders as above. Raises UserError if there is no such file.
    """
    files: dict[Path, Path] = {}  # by resolved path, because several paths and links may lead to a file
    for given in paths:
        for file in _files_of(os.fspath(given)):
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _files_of(given: str) -> list[Path]:
    path = Path(given)
    if path.is_file() and path.name.endswith(SUFFIXES):
        return [path]
    matches = [path] if path.exists() else [Path(match) for match in glob.glob(given, recursive=True)]
    found = {file for match in matches for file in (_inside(match) if match.is_dir() else [match])}
    known = [file for file in found if file.name.endswith(SUFFIXES) and file.is_file()]
    if known:
        return sorted(known, key=lambda file: file.parts)
    if not (path.exists() or glob.has_magic(given)):
        raise UserError(f"input: {path} does not exist; check the path")
    raise UserError(f"input: got {given}, needs a {', '.join(SUFFIXES)} file, or a folder or pattern of them")


def _inside(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:  # os.walk ignores errors by default
        raise error

    found: list[Path] = []
    entered = set()
    for name, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        if (real := Path(name).resolve()) in entered:
            folders.clear()  # a link to a folder that was entered already, perhaps a loop
            continue
        entered.add(real)
        folders.sort()
        found += [Path(name, file) for file in files]
    return found


@contextmanager
def open_lines(file: FileRange) -> Iterator[BinaryIO]:
    """Open a file of lines; a stream is decompressed in bounded pieces, and UserError raised if it is damaged."""
    try:
        if file.ending == ".jsonl":
            with file.path.open("rb") as plain:
                yield plain
        elif file.ending == ".jsonl.gz":
            with gzip.open(file.path, "rb") as stream:
                yield cast(BinaryIO, stream)
        else:
            pyarrow = _import_pyarrow(file.path)  # unlike zstandard's own reader it detects truncated data
            with (
                pyarrow.CompressedInputStream(pyarrow.OSFile(str(file.path)), "zstd") as compressed,
                io.BufferedReader(compressed, BLOCK) as lines,
            ):
                yield lines
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # a disk error; those about the data have no errno
            raise
        raise UserError(f"{file.path}: damaged or cut off ({error}); make it again") from None


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


@lru_cache(maxsize=1)
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


def row_group_sizes(file: FileRange, columns: Sequence[str]) -> list[int]:
    """Return the uncompressed bytes of each row group of a .parquet file.

    Raises UserError if a column is missing, there is no row, or the file is damaged.
    """
    with _open_table(file, columns) as table:
        return [table.metadata.row_group(group).total_byte_size for group in range(table.metadata.num_row_groups)]


def read_rows(file: FileRange, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based row of the .parquet file, its values by column) of the range's row groups; raises as above."""
    with _open_table(file, columns) as table:
        groups = list(range(file.start, min(file.end, table.metadata.num_row_groups)))
        row = sum(table.metadata.row_group(group).num_rows for group in range(file.start))
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False):
            yield from enumerate(batch.to_pylist(), start=row + 1)
            row += len(batch)


@contextmanager
def _open_table(file: FileRange, columns: Sequence[str]) -> Iterator[Any]:
    pyarrow = _import_pyarrow(file.path)
    try:
        with pyarrow.parquet.ParquetFile(file.path, buffer_size=BLOCK, pre_buffer=False) as table:
            names = table.schema_arrow.names
            for name in columns:
                if name not in names:
                    have = ", ".join(map(repr, names[:8])) or "none"
                    raise UserError(f"{file.path}: has no column {name!r} (it has {have}; see --json-key)")
            if not table.metadata.num_rows:
                raise UserError(f"{file.path}: the file is empty; leave it out")
            yield table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:  # a disk error; pyarrow's own have no errno
            raise
        raise UserError(f"{file.path}: damaged, or no .parquet file ({first_line(error)}); make it again") from None


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_package(str(path), "pyarrow") from None
    return pyarrow
