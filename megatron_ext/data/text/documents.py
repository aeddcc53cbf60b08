"""Read documents from files, one at a time, and report every bad one by file and line.

files --pieces--> Piece --read_piece--> Document | Problem --keep_good--> Document
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron_ext.data.text.chat import ChatError, ChatTemplate, Spans
from megatron_ext.data.text.parquet import read_rows, row_group_sizes
from megatron_ext.data.text.sources import Source, count_lines, find_files, open_stream, read_lines
from megatron_ext.errors import UserError

PROBLEMS_KEPT = 10
MAX_DOCUMENT_BYTES = 64 << 20  # a text is tokenized as a whole: up to 9 GB of memory by MEMORY_PER_BYTE
MEMORY_PER_BYTE = 130  # measured with a Hugging Face tokenizer without chunks
EVERYTHING = 2**63  # larger than any file


@dataclass(frozen=True)
class Document:
    """A text, its origin, and its group.

    Attributes:
        line: 1-based line of a .jsonl file or row of a .parquet file; None if it is unknown without counting.
        key: the value of `Fields.key`, as text.
        source_name: the value of `Fields.source`, as text.
        size: its bytes in the source, or for a group those of all its texts.
        spans: for a conversation, the characters of the assistant's messages.
    """

    text: str
    source: Path
    line: int | None
    key: str | None = None
    size: int = 0
    spans: Spans | None = None
    source_name: str | None = None


@dataclass(frozen=True)
class Problem:
    """The place and the reason of a bad document; its `str` is one line."""

    where: str
    cause: str
    remedy: str = "mend it"

    def __str__(self) -> str:
        return f"{self.where}: {self.cause}"


class _BadDocumentError(Exception):
    """Passes the cause and the remedy of a problem within this module."""

    def __init__(self, cause: str, remedy: str = "mend it") -> None:
        self.cause, self.remedy = cause, remedy


@dataclass(frozen=True)
class Fields:
    """The fields of a line, or columns of a table, for text, group and source; and the limit of a document.

    Attributes:
        limit: maximum bytes of a line, of a .txt file, or of a text in a .parquet file.
        chat: renders the field's messages as text; None: the field is a text.
    """

    text: str = "text"
    key: str | None = None
    limit: int = MAX_DOCUMENT_BYTES
    chat: ChatTemplate | None = None
    source: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields other than the text that each document must have."""
        return tuple(name for name in (self.key, self.source) if name is not None)

    def key_and_source(self, values: Sequence[str]) -> tuple[str | None, str | None]:
        """Return the key and the source's name from the values of `keys`; None for those not requested."""
        key = None if self.key is None else values[0]
        return key, None if self.source is None else values[-1]


@dataclass
class ReadProgress:
    """Counts the bad documents omitted so far, and keeps descriptions of the first ones."""

    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    def skip(self, problem: Problem) -> None:
        self.skipped += 1
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(str(problem))


@dataclass(frozen=True)
class Piece:
    """A part of a source.

    Attributes:
        start, end: for a .jsonl file, the byte range in which its lines begin; for a .parquet file, the range of row
            groups; a .txt file or a stream is always complete.
    """

    source: Source
    start: int
    end: int


def read_documents(
    paths: Sequence[str | os.PathLike[str]],
    text_field: str = "text",
    on_bad: Literal["raise", "skip"] = "raise",
    progress: ReadProgress | None = None,
    *,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    key_field: str | None = None,
) -> Iterator[Document]:
    """Yield each document of the files, in order: a line of .jsonl, a row of .parquet, or a .txt file.

    Bad documents are invalid JSON or UTF-8, a missing or non-string field, an empty text or file, and texts that are
    too long. Blank lines of a .jsonl file are ignored, and byte-order marks are removed.

    Args:
        paths: files, folders, patterns and "-", see `find_files`.
        text_field: the field with the text.
        on_bad: "raise" stops at the first bad document, "skip" omits it and counts it in `progress`.
        progress: updated as documents are yielded.
        max_document_bytes: a longer line, file or text is bad.
        key_field: the field with the group, if needed.

    Raises:
        UserError: a bad document, named as FILE:LINE (if on_bad is "raise"); a bad path; damaged data.
    """
    fields = Fields(text_field, key_field, limit=max_document_bytes)
    for source in map(Source.of, find_files(paths)):
        if source.ending == ".parquet":
            row_group_sizes(source.path, fields.text, fields.keys)  # raises UserError if the columns are missing
        content = read_piece(Piece(source, 0, EVERYTHING), fields)
        yield from keep_good(content, on_bad == "skip", progress or ReadProgress())


def keep_good(items: Iterable[Document | Problem], skip: bool, progress: ReadProgress) -> Iterator[Document]:
    """Yield the documents; count a problem in `progress`, or raise UserError unless `skip`."""
    for item in items:
        if isinstance(item, Document):
            yield item
        elif skip:
            progress.skip(item)
        else:
            raise UserError(f"{item}; {item.remedy}, or pass --skip-bad-lines")


def read_piece(piece: Piece, fields: Fields) -> Iterator[Document | Problem]:
    """Yield the content of a piece, in order."""
    source = piece.source
    if source.ending == ".parquet":
        yield from _read_rows(piece, fields)
    elif source.ending == ".txt":
        yield _read_text(source, fields)
    else:
        with open_stream(source) if source.is_stream else source.path.open("rb") as file:
            yield from _read_lines(file, piece, fields)


def _read_text(source: Source, fields: Fields) -> Document | Problem:
    try:
        if fields.keys:
            raise _BadDocumentError(f"a .txt file has no field {fields.keys[0]!r}", "leave it out")
        with source.path.open("rb") as file:
            raw = file.read(fields.limit + 1)  # enough to detect that it is too long
        text = _text(raw.removeprefix(codecs.BOM_UTF8), fields.limit, unit="line")
    except _BadDocumentError as bad:
        return Problem(source.name, bad.cause, bad.remedy)
    return Document(text, source.path, None, None, len(raw))


def _read_rows(piece: Piece, fields: Fields) -> Iterator[Document | Problem]:
    for row, raw, raw_keys in read_rows(piece.source.path, piece.start, piece.end, fields.text, fields.keys):
        try:
            if raw is None:
                raise _BadDocumentError(f"column {fields.text!r} is null")
            keys = []
            for name, raw_key in zip(fields.keys, raw_keys, strict=True):
                if raw_key is None:
                    raise _BadDocumentError(f"column {name!r} is null")
                keys.append(_text(raw_key, fields.limit, unit="byte"))
            text = _text(raw, fields.limit, unit="byte")
        except _BadDocumentError as bad:
            yield Problem(f"{piece.source.name}: row {row}", bad.cause, bad.remedy)
        else:
            key, source_name = fields.key_and_source(keys)
            yield Document(text, piece.source.path, row, key, len(raw), source_name=source_name)


def _read_lines(file: BinaryIO, piece: Piece, fields: Fields) -> Iterator[Document | Problem]:
    """Yield the documents of a piece's lines; preceding lines are counted only to report a bad one."""
    name, number = piece.source.name, 0
    before = None if piece.start else 0
    for number, raw in enumerate(read_lines(file, piece.start, piece.end, fields.limit), start=1):
        if number == 1 and piece.start == 0:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            continue
        try:
            text, keys, spans = _parse(raw, fields)
        except _BadDocumentError as bad:
            # Counting the lines before a piece means reading the file up to it, so it is done only for a bad line.
            before = count_lines(piece.source.path, piece.start) if before is None else before
            yield Problem(f"{name}:{before + number}", bad.cause, bad.remedy)
        else:
            at = None if before is None else before + number
            key, source_name = fields.key_and_source(keys)
            yield Document(text, piece.source.path, at, key, len(raw), spans, source_name)
    if not number and piece.start == 0:
        yield Problem(name, "the file is empty", "leave it out")


def _parse(line: bytes, fields: Fields) -> tuple[str, list[str], Spans | None]:
    """Parse a line of JSON; return its text, its keys, and the spans of a conversation."""
    decoded = _text(line, fields.limit, unit="byte")
    try:
        value = json.loads(decoded)
    except json.JSONDecodeError as error:
        raise _BadDocumentError(f"invalid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number with too many digits, or too deeply nested brackets
        raise _BadDocumentError(f"invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise _BadDocumentError(f"holds a JSON {type(value).__name__}, needs an object with a field {fields.text!r}")
    if fields.chat is not None:
        messages = _field(value, fields.text, list)
        try:
            conversation = fields.chat.render(messages, value.get("tools"))
        except ChatError as error:
            raise _BadDocumentError(str(error)) from None
        _check_encodable(conversation.text, fields.text)
        return conversation.text, [], conversation.spans
    text = _field(value, fields.text, str)
    if not text:
        raise _BadDocumentError("the text is empty")
    return text, [str(_field(value, name, (str, int))) for name in fields.keys], None


def _field(record: dict[str, Any], name: str, types: type | tuple[type, ...]) -> Any:
    if name not in record:
        have = ", ".join(map(repr, list(record)[:8])) or "none"
        flag = "--messages-field" if types is list else "--json-key"
        raise _BadDocumentError(f"has no field {name!r} (it has {have}; see {flag})")
    value = record[name]
    if not isinstance(value, types):
        needed = "a list of messages" if types is list else "a string"
        raise _BadDocumentError(f"field {name!r} is a {type(value).__name__}, needs {needed}")
    _check_encodable(str(value), name)
    return value


def _check_encodable(text: str, name: str) -> None:
    r"""Raise an error for an unpaired surrogate such as JSON's \ud83d, which cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadDocumentError(f"field {name!r} holds half a surrogate pair, which is no character") from None


def _text(raw: bytes, limit: int, unit: Literal["line", "byte"]) -> str:
    """Decode a text, checking its size; `unit` is the unit for the position of invalid bytes."""
    if len(raw) > limit:
        raise _BadDocumentError(*too_long(limit))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = error.start + 1 if unit == "byte" else raw.count(b"\n", 0, error.start) + 1
        raise _BadDocumentError(f"invalid UTF-8 (0x{raw[error.start]:02x}) at {unit} {where}") from None
    if not text:
        raise _BadDocumentError("the text is empty")
    return text


def too_long(limit: int) -> tuple[str, str]:
    """Return cause and remedy for a document of more than `limit` bytes."""
    remedy = f"raise that (tokenizing a byte takes up to {MEMORY_PER_BYTE} bytes of memory), cut the document"
    return f"longer than --max-document-bytes {limit}", remedy
