"""Find the files of documents, and read these one at a time; every bad one is described by file and line.

paths --find_files--> FileRange --lines, rows or a text--> JSON objects --check--> Document, or what is wrong with it
"""

import codecs
import glob
import gzip
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ext.data.text.chat import VARIABLES, ChatError, ChatTemplate, Spans, has_json_in_json
from megatron_ext.errors import UserError, first_line, optional_module
from megatron_ext.files.reading import JsonObject
from megatron_ext.launch import is_first

logger = logging.getLogger(__name__)
LINES = {f".{name}{packed}": f".jsonl{packed}" for name in ("jsonl", "json") for packed in ("", ".gz", ".zst")}
SUFFIXES = (*LINES, ".parquet", ".txt")
BLOCK = 1 << 20
ROWS_AT_ONCE = 64  # of a .parquet file
TOOLS = "tools"  # the field of the tools of a conversation, which may be missing
LARGEST_WINDOW = 31  # of a .zst file: 2^31 bytes, as `zstd --long=31` makes it; memory is used as the file needs it
EVERYTHING = 2**63  # larger than any file
MAX_DOCUMENT_BYTES = 64 << 20  # a text is tokenized as a whole, in up to 130 bytes of memory per byte [measured]
Refuse = Callable[[str], object]


@dataclass(frozen=True)
class FileRange:
    """A file in its state at the start of the work, or a part of it; `size` is the whole file's, in bytes.

    `start` and `end` are for a .jsonl file the byte range in which the part's lines begin, for a .parquet file the
    range of row groups; a .txt file or a stream is always complete.
    """

    path: Path
    size: int
    mtime_ns: int
    start: int = 0
    end: int = EVERYTHING

    @classmethod
    def of(cls, path: Path) -> "FileRange":
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns)

    @property
    def ending(self) -> str:
        """The suffix; .jsonl (.jsonl.gz, ...) also for lines in a file named .json."""
        suffix = next(suffix for suffix in SUFFIXES if self.path.name.endswith(suffix))
        return LINES.get(suffix, suffix)

    def check_unchanged(self) -> None:
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise UserError(f"{self.path} changed while it was read; start again once it stays as it is")


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that `paths` refer to, each once, in order.

    A folder stands for all files inside it with a known suffix, including those in linked folders, sorted by path; a
    pattern with *, ** or ? for its matches, with folders as above. A .json file counts if it holds lines, not one
    value. A warning names files that are omitted. Raises UserError for no such file, or a path given twice.
    """
    for path, count in Counter(Path(path).resolve() for path in paths).items():
        if count > 1:
            raise UserError(f"input: got {path} twice, whose documents would be read once; leave one of them out")
    files: dict[Path, Path] = {}  # by resolved path, because several paths and links may lead to a file
    omitted: list[Path] = []
    for pattern in [os.fspath(path) for path in paths]:
        candidates = _matches(pattern)
        readable = set(filter(_holds_documents, candidates))
        if not readable:
            if not candidates and not os.path.exists(pattern) and not glob.has_magic(pattern):
                raise UserError(f"input: {pattern} does not exist; check the path")
            needed = f"a {', '.join(SUFFIXES)} file (.json with an object a line; jq -c '.[]' makes them of a list)"
            raise UserError(f"input: got {pattern}, needs {needed}, or a folder or pattern of them")
        omitted += sorted(candidates - readable)
        for file in sorted(readable, key=lambda file: file.parts):
            files.setdefault(file.resolve(), file)
    if omitted and is_first():
        names = ", ".join(file.name for file in omitted[:3])
        logger.warning("input: files of other kinds are not read: %d (%s)", len(omitted), names)
    return list(files.values())


def _matches(pattern: str) -> set[Path]:
    """Return the files that a path or pattern stands for, of any kind, with the files in folders."""
    paths = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    files: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            files |= set(_inside(path))
        else:
            files.add(path)
    return files


def _holds_documents(file: Path) -> bool:
    """Return whether a file is read: by its suffix, and for .json if its first line may be a whole object."""
    if file.suffix != ".json" or not file.is_file():
        return file.name.endswith(SUFFIXES) and file.is_file()
    with file.open("rb") as lines:
        line = next((line for line in iter(partial(lines.readline, BLOCK), b"") if line.strip()), b"")
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    return text.startswith(b"{") and (text.endswith(b"}") or len(line) == BLOCK)


def _inside(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:  # os.walk ignores errors by default
        raise error

    inside: list[Path] = []
    entered = set()
    for name, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        resolved = Path(name).resolve()
        if resolved in entered:
            folders.clear()  # a link to a folder that was entered already, perhaps a loop
            continue
        entered.add(resolved)
        folders.sort()
        inside += [Path(name, file) for file in files]
    return inside


@contextmanager
def open_lines(file: FileRange) -> Iterator[BinaryIO]:
    """Open a file of lines; a stream is decompressed in bounded pieces. Raises UserError if that is impossible."""
    failures: tuple[type[Exception], ...] = ()
    opened: Any
    if file.ending == ".jsonl":
        opened = file.path.open("rb")
    elif file.ending == ".jsonl.gz":
        opened = gzip.GzipFile(file.path, "rb")
        failures = (EOFError, zlib.error, gzip.BadGzipFile)
    else:
        # unlike zstandard's reader it detects truncated data, and unlike pyarrow's it reads every window
        zstd = optional_module(str(file.path), "backports.zstd", "backports.zstd")
        opened = zstd.open(file.path, options={zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW})
        failures = (EOFError, zstd.ZstdError)
    with opened:
        try:
            yield opened
        except failures as error:
            raise UserError(f"{file.path}: cannot be decompressed ({first_line(error)}); make it again") from None


def read_lines(file: BinaryIO, start: int, end: int, limit: int) -> Iterator[bytes]:
    """Yield the lines that begin in bytes [start, end) of a file, without their newlines.

    A line longer than `limit` is truncated to limit + 1 bytes, which bounds memory and still shows that it is too long.
    """
    position = 0
    if start:
        file.seek(start - 1)  # include the newline before a line that begins at `start`
        position = start - 1 + _skip_line(file, end - start + 1)
    while position < end:
        line = file.readline(limit + 1)
        if not line:
            break
        position += len(line)
        if not line.endswith(b"\n"):
            position += _skip_line(file, end - position)
        yield line.removesuffix(b"\n")


def _skip_line(file: BinaryIO, at_most: int) -> int:
    """Skip the rest of a line, or at most `at_most` bytes of it plus a block; return the number of bytes skipped.

    If a line spans many shards, each of them reads only its own bytes of it.
    """
    length = 0
    while length < at_most:
        part = file.readline(BLOCK)
        length += len(part)
        if not part or part.endswith(b"\n"):
            break
    return length


@lru_cache(maxsize=1)
def count_lines(path: Path, end: int) -> int:
    """Return the number of lines of a file that begin before byte `end`."""
    if not end:
        return 0
    newlines = 0
    with path.open("rb") as file:
        for start in range(0, end - 1, BLOCK):  # a newline at end - 1 begins a line at `end`
            newlines += file.read(min(end - 1 - start, BLOCK)).count(b"\n")
    return newlines + 1


def row_group_sizes(file: FileRange, columns: Sequence[str]) -> list[int]:
    """Return the uncompressed bytes of each row group of a .parquet file.

    Raises UserError if a column is missing or the file is damaged.
    """
    with _open_table(file, columns) as table:
        return [table.metadata.row_group(group).total_byte_size for group in range(table.metadata.num_row_groups)]


def read_rows(
    file: FileRange, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, JsonObject | Exception]]:
    """Yield (1-based row of the .parquet file, its values by column) of the range's row groups; raises as above.

    `optional` are columns that may be missing. A row that Python cannot represent, such as one with text that is no
    UTF-8, is the error instead.
    """
    with _open_table(file, columns) as table:
        columns = [*columns, *(set(optional) & set(table.schema_arrow.names) - set(columns))]
        groups = list(range(file.start, min(file.end, table.metadata.num_row_groups)))
        row = sum(table.metadata.row_group(group).num_rows for group in range(file.start))
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=columns, use_threads=False):
            yield from enumerate(_rows(batch), start=row + 1)
            row += len(batch)


def _rows(batch: Any) -> list[Any]:
    try:
        rows: list[Any] = batch.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            return [error]
        return [row for place in range(len(batch)) for row in _rows(batch.slice(place, 1))]
    return rows


@contextmanager
def _open_table(file: FileRange, columns: Sequence[str]) -> Iterator[Any]:
    pyarrow = optional_module(str(file.path), "pyarrow")
    parquet = optional_module(str(file.path), "pyarrow.parquet")
    try:
        with parquet.ParquetFile(file.path, buffer_size=BLOCK, pre_buffer=False) as table:
            names = table.schema_arrow.names
            for name in columns:
                if name not in names:
                    have = ", ".join(map(repr, names[:8])) or "none"
                    raise UserError(f"{file.path}: has no column {name!r} (it has {have}; see --json-key)")
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None):  # of the disk; pyarrow's own have no errno
            raise
        raise UserError(f"{file.path}: cannot be read as .parquet ({first_line(error)}); make it again") from None


@dataclass(frozen=True)
class Document:
    text: str
    source: Path  # its file
    key: str | None = None  # the value of `Fields.key`
    source_name: str | None = None  # the value of `Fields.source`
    spans: Spans = ()  # the characters of the assistant's messages in a conversation
    json_in_json: bool = False  # whether a template wrote a call's arguments, a string of JSON, as JSON once more


@dataclass(frozen=True)
class Fields:
    """The fields of a line, or columns of a table, for text, group and source."""

    text: str = "text"
    key: str | None = None
    limit: int = MAX_DOCUMENT_BYTES  # of a line, of a .txt file, or of a text in a .parquet file
    chat: ChatTemplate | None = None  # renders the messages of the field `text`; None: it holds a text
    source: str | None = None

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.text, self.key, self.source) if name is not None))

    @property
    def optional_columns(self) -> list[str]:
        if self.chat is None:
            return []
        return [TOOLS, VARIABLES]


class _BadDocumentError(Exception):
    """What is wrong with a document."""


def read_documents(
    paths: Sequence[str | os.PathLike[str]], text_field: str = "text", key_field: str | None = None
) -> Iterator[Document]:
    """Yield each document of the files, in order: a line of .jsonl, a row of .parquet, or a .txt file.

    `paths` are files, folders and patterns, see `find_files`. Blank lines of a .jsonl file are ignored, and byte-order
    marks are removed; a text may be empty. Raises UserError for a bad document (invalid JSON or UTF-8, a missing or
    non-string field, or more than MAX_DOCUMENT_BYTES), named as FILE:LINE; for a bad path; and for damaged data.
    """
    for path in find_files(paths):
        yield from read_range(FileRange.of(path), Fields(text_field, key_field), stop)


def stop(problem: str) -> None:
    raise UserError(f"{problem}; correct it")


def read_range(file: FileRange, fields: Fields, refuse: Refuse) -> Iterator[Document]:
    """Yield the documents of a file or a part of it, in order; call `refuse` with a line of text for each bad one."""
    is_text = file.ending == ".txt"
    number = 0
    for number, raw in _items(file, fields):
        try:
            if isinstance(raw, Exception):
                raise _undecodable(raw)
            if isinstance(raw, dict):
                yield _document(raw, file.path, fields)
            elif is_text or raw.strip():  # a blank line is no document
                yield _document(_record(raw, is_text, fields), file.path, fields)
        except (_BadDocumentError, ChatError) as bad:
            place = "" if is_text else f":{number}"
            if file.ending == ".jsonl":  # this reads the file up to the range, so it is done only for a bad line
                place = f":{count_lines(file.path, file.start) + number}"
            refuse(f"{file.path}{place}: {bad}")
    if not number and not file.start:
        refuse(f"{file.path}: the file is empty")


def _items(file: FileRange, fields: Fields) -> Iterator[tuple[int, bytes | JsonObject | Exception]]:
    """Yield the numbers and contents of a .txt file, of lines counted from the start of the range, or of rows."""
    limit = fields.limit + len(codecs.BOM_UTF8)  # which may precede the first one
    if file.ending == ".parquet":
        for number, row in read_rows(file, fields.columns, fields.optional_columns):
            if fields.chat is not None and isinstance(row, dict):
                row = {name: _without_nulls(value) for name, value in row.items()}
            yield number, row
    elif file.ending == ".txt":
        with file.path.open("rb") as text:
            yield 1, text.read(limit + 1).removeprefix(codecs.BOM_UTF8)  # enough to detect that it is too long
    else:
        with open_lines(file) as lines:
            for number, line in enumerate(read_lines(lines, file.start, file.end, limit), start=1):
                if number == 1 and not file.start:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield number, line


def _record(raw: bytes, is_text: bool, fields: Fields) -> JsonObject:
    """Return the JSON object of a line; a text becomes an object with this text."""
    if len(raw) > fields.limit:
        raise _BadDocumentError(too_long(fields.limit))
    try:
        text = raw.decode()
        value = {fields.text: text} if is_text else json.loads(text)
    except UnicodeDecodeError as error:
        raise _undecodable(error) from None
    except json.JSONDecodeError as error:
        raise _BadDocumentError(f"invalid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number with too many digits, or too deeply nested brackets
        raise _BadDocumentError(f"invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise _BadDocumentError(f"holds a JSON {type(value).__name__}, needs an object with a field {fields.text!r}")
    return value


def _undecodable(error: Exception) -> _BadDocumentError:
    if not isinstance(error, UnicodeDecodeError):
        return _BadDocumentError(first_line(error))
    return _BadDocumentError(f"invalid UTF-8 (0x{error.object[error.start]:02x}) at byte {error.start + 1}")


def _document(record: JsonObject, path: Path, fields: Fields) -> Document:
    text = ""
    spans: Spans = ()
    json_in_json = False
    if fields.chat is None:
        text = _field(record, fields.text, str, "a string")
    else:
        messages = _field(record, fields.text, list, "a list of messages")
        if messages:
            text, spans = fields.chat.setting(record.get(VARIABLES)).render(messages, record.get(TOOLS))
            json_in_json = has_json_in_json(messages, text)
    key = None
    if fields.key is not None:
        key = str(_field(record, fields.key, (str, int), "a string"))
    source = None
    if fields.source is not None:
        source = str(_field(record, fields.source, (str, int), "a string"))
    try:
        size = len(text.encode())
        f"{key}{source}".encode()
    except UnicodeEncodeError:  # such as JSON's \ud83d
        raise _BadDocumentError("holds half a surrogate pair, which is no character") from None
    if size > fields.limit:  # a text of a .parquet file, or one that a chat template made longer
        raise _BadDocumentError(too_long(fields.limit))
    return Document(text, path, key, source, spans, json_in_json)


def _without_nulls(value: Any) -> Any:
    """Remove the null fields of structs and maps, which are missing keys in lines of JSON."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _field(record: JsonObject, name: str, types: type | tuple[type, ...], needed: str) -> Any:
    if name not in record:
        have = ", ".join(map(repr, list(record)[:8])) or "none"
        flag = "--messages-field" if types is list else "--json-key"
        raise _BadDocumentError(f"has no field {name!r} (it has {have}; see {flag})")
    if not isinstance(record[name], types):
        raise _BadDocumentError(f"field {name!r} is a {type(record[name]).__name__}, needs {needed}")
    return record[name]


def too_long(limit: int) -> str:
    return f"longer than --max-document-bytes {limit}"
