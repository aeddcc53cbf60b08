"""Read documents from files, one at a time; every bad one is described by file and line.

files --pieces--> Piece --read_piece--> Document, or what is wrong --keep_good--> Document
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ext.data.text.chat import ChatError, ChatTemplate, Spans
from megatron_ext.data.text.parquet import read_rows, row_group_sizes
from megatron_ext.data.text.sources import Source, count_lines, find_files, open_stream, read_lines
from megatron_ext.errors import UserError

MAX_DOCUMENT_BYTES = 64 << 20  # a text is tokenized as a whole, in up to 130 bytes of memory per byte [measured]
EVERYTHING = 2**63  # larger than any file


@dataclass(frozen=True)
class Document:
    """A text and its origin.

    Attributes:
        key: the value of `Fields.key`, as text.
        source_name: the value of `Fields.source`, as text.
        spans: for a conversation, the characters of the assistant's messages.
    """

    text: str
    source: Path
    key: str | None = None
    source_name: str | None = None
    spans: Spans = ()


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

    def document(self, path: Path, values: dict[str | None, str], spans: Spans = ()) -> Document:
        """Return the document of a file with these values of the fields."""
        return Document(values[self.text], path, values.get(self.key), values.get(self.source), spans)


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


class _BadDocumentError(Exception):
    """What is wrong with a document."""


def read_documents(
    paths: Sequence[str | os.PathLike[str]], text_field: str = "text", key_field: str | None = None
) -> Iterator[Document]:
    """Yield each document of the files, in order: a line of .jsonl, a row of .parquet, or a .txt file.

    Blank lines of a .jsonl file are ignored, and byte-order marks are removed.

    Args:
        paths: files, folders and patterns, see `find_files`.
        text_field: the field with the text.
        key_field: the field with the group, if needed.

    Raises:
        UserError: a bad document (invalid JSON or UTF-8, a missing or non-string field, an empty text, or more than
            MAX_DOCUMENT_BYTES), named as FILE:LINE; a bad path; damaged data.
    """
    fields = Fields(text_field, key_field)
    for source in map(Source.of, find_files(paths)):
        if source.ending == ".parquet":
            row_group_sizes(source.path, fields.text, fields.keys)  # raises UserError if the columns are missing
        yield from keep_good(read_piece(Piece(source, 0, EVERYTHING), fields))


def keep_good(items: Iterable[Document | str], skip: Callable[[str], object] | None = None) -> Iterator[Document]:
    """Yield the documents; call `skip` with the description of each bad one, or raise UserError."""
    for item in items:
        if isinstance(item, Document):
            yield item
        elif skip is None:
            raise UserError(f"{item}; correct it, or pass --skip-bad-lines")
        else:
            skip(item)


def read_piece(piece: Piece, fields: Fields) -> Iterator[Document | str]:
    """Yield the documents of a piece, in order, and a line of text for each bad one."""
    source = piece.source
    if source.ending == ".parquet":
        for row, cells in read_rows(source.path, piece.start, piece.end, (fields.text, *fields.keys)):
            yield _from_cells(f"{source.path}: row {row}", source, fields, cells)
    elif source.ending == ".txt":
        with source.path.open("rb") as file:
            raw = file.read(fields.limit + 1)  # enough to detect that it is too long
        cells = (raw.removeprefix(codecs.BOM_UTF8), *(None for _ in fields.keys))
        yield _from_cells(str(source.path), source, fields, cells)
    else:
        with open_stream(source) if source.is_stream else source.path.open("rb") as file:
            yield from _read_lines(file, piece, fields)


def _from_cells(place: str, source: Source, fields: Fields, cells: Sequence[bytes | None]) -> Document | str:
    values: dict[str | None, str] = {}
    try:
        for name, raw in zip((fields.text, *fields.keys), cells, strict=True):
            if raw is None:
                raise _BadDocumentError(f"has no {name!r}")
            values[name] = _text(raw, fields.limit)
    except _BadDocumentError as bad:
        return f"{place}: {bad}"
    return fields.document(source.path, values)


def _read_lines(file: BinaryIO, piece: Piece, fields: Fields) -> Iterator[Document | str]:
    path, number = piece.source.path, 0
    before: int | None = None
    for number, raw in enumerate(read_lines(file, piece.start, piece.end, fields.limit), start=1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 and piece.start == 0 else raw
        if not line.strip():
            continue
        try:
            document = _parse(line, path, fields)
        except _BadDocumentError as bad:
            # Counting the lines before a piece means reading the file up to it, so it is done only for a bad line.
            before = count_lines(path, piece.start) if before is None else before
            yield f"{path}:{before + number}: {bad}"
        else:
            yield document
    if not number and piece.start == 0:
        yield f"{path}: the file is empty"


def _parse(line: bytes, path: Path, fields: Fields) -> Document:
    decoded = _text(line, fields.limit)
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
        return fields.document(path, {fields.text: conversation.text}, conversation.spans)
    text = _field(value, fields.text, str)
    if not text:
        raise _BadDocumentError("the text is empty")
    values: dict[str | None, str] = {name: str(_field(value, name, (str, int))) for name in fields.keys}
    values[fields.text] = text
    return fields.document(path, values)


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


def _text(raw: bytes, limit: int) -> str:
    if len(raw) > limit:
        raise _BadDocumentError(too_long(limit))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadDocumentError(f"invalid UTF-8 (0x{raw[error.start]:02x}) at byte {error.start + 1}") from None
    if not text:
        raise _BadDocumentError("the text is empty")
    return text


def too_long(limit: int) -> str:
    """Return what is wrong with a document of more than `limit` bytes."""
    return f"longer than --max-document-bytes {limit}"
