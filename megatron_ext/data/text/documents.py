"""Read documents from files, one at a time; every bad one is described by file and line.

FileRange --lines, rows or a text--> JSON objects --check--> Document, or a call with what is wrong
"""

import codecs
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.text.chat import ChatError, ChatTemplate, Spans
from megatron_ext.data.text.sources import FileRange, count_lines, find_files, open_lines, read_lines, read_rows
from megatron_ext.errors import UserError

MAX_DOCUMENT_BYTES = 64 << 20  # a text is tokenized as a whole, in up to 130 bytes of memory per byte [measured]
Refuse = Callable[[str], object]


@dataclass(frozen=True)
class Document:
    """A text, its file, and the values of `Fields.key` and `Fields.source`, as text.

    `spans` are the characters of the assistant's messages in a conversation.
    """

    text: str
    source: Path
    key: str | None = None
    source_name: str | None = None
    spans: Spans = ()


@dataclass(frozen=True)
class Fields:
    """The fields of a line, or columns of a table, for text, group and source.

    `limit` is the maximum bytes of a line, of a .txt file, or of a text in a .parquet file. `chat` renders the messages
    of the field `text`; None: it holds a text.
    """

    text: str = "text"
    key: str | None = None
    limit: int = MAX_DOCUMENT_BYTES
    chat: ChatTemplate | None = None
    source: str | None = None

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.text, self.key, self.source) if name is not None))


class _BadDocumentError(Exception):
    """What is wrong with a document."""


def read_documents(
    paths: Sequence[str | os.PathLike[str]], text_field: str = "text", key_field: str | None = None
) -> Iterator[Document]:
    """Yield each document of the files, in order: a line of .jsonl, a row of .parquet, or a .txt file.

    `paths` are files, folders and patterns, see `find_files`. Blank lines of a .jsonl file are ignored, and byte-order
    marks are removed. Raises UserError for a bad document (invalid JSON or UTF-8, a missing or non-string field, an
    empty text, or more than MAX_DOCUMENT_BYTES), named as FILE:LINE; for a bad path; and for damaged data.
    """
    for path in find_files(paths):
        yield from read_range(FileRange.of(path), Fields(text_field, key_field), stop)


def stop(problem: str) -> None:
    raise UserError(f"{problem}; correct it, or pass --skip-bad-lines")


def read_range(file: FileRange, fields: Fields, refuse: Refuse) -> Iterator[Document]:
    """Yield the documents of a file or a part of it, in order; call `refuse` with a line of text for each bad one."""
    number = 0
    for number, raw in _items(file, fields):
        try:
            if isinstance(raw, dict):
                yield _document(raw, file.path, fields)
            elif file.ending == ".txt" or raw.strip():  # a blank line is no document
                yield _document(_record(raw, file.ending == ".txt", fields), file.path, fields)
        except (_BadDocumentError, ChatError) as bad:
            # Counting the lines before a range means reading the file up to it, so it is done only for a bad line.
            before = count_lines(file.path, file.start) if file.ending == ".jsonl" else 0
            refuse(f"{file.path}{'' if file.ending == '.txt' else f':{before + number}'}: {bad}")
    if not number and not file.start:
        refuse(f"{file.path}: the file is empty")


def _items(file: FileRange, fields: Fields) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """Yield the numbers and contents of a .txt file, of lines counted from the start of the range, or of rows."""
    if file.ending == ".parquet":
        yield from read_rows(file, fields.columns)
    elif file.ending == ".txt":
        with file.path.open("rb") as text:
            yield 1, text.read(fields.limit + 1).removeprefix(codecs.BOM_UTF8)  # enough to detect that it is too long
    else:
        with open_lines(file) as lines:
            for number, line in enumerate(read_lines(lines, file.start, file.end, fields.limit), start=1):
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 and not file.start else line


def _record(raw: bytes, is_text: bool, fields: Fields) -> dict[str, Any]:
    """Return the JSON object of a line, or of a text the object that has it."""
    if len(raw) > fields.limit:
        raise _BadDocumentError(too_long(fields.limit))
    try:
        text = raw.decode()
        value = {fields.text: text} if is_text else json.loads(text)
    except UnicodeDecodeError as error:
        raise _BadDocumentError(f"invalid UTF-8 (0x{raw[error.start]:02x}) at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise _BadDocumentError(f"invalid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number with too many digits, or too deeply nested brackets
        raise _BadDocumentError(f"invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise _BadDocumentError(f"holds a JSON {type(value).__name__}, needs an object with a field {fields.text!r}")
    return value


def _document(record: dict[str, Any], path: Path, fields: Fields) -> Document:
    spans: Spans = ()
    if fields.chat is None:
        text = _field(record, fields.text, str, "a string")
    else:
        messages = _field(record, fields.text, list, "a list of messages")
        conversation = fields.chat.render(messages, record.get("tools"))
        text, spans = conversation.text, conversation.spans
    if not text:
        raise _BadDocumentError("the text is empty")
    key, source = (
        None if name is None else str(_field(record, name, (str, int), "a string"))
        for name in (fields.key, fields.source)
    )
    try:
        size, _ = len(text.encode()), f"{key}{source}".encode()
    except UnicodeEncodeError:  # such as JSON's \ud83d
        raise _BadDocumentError("holds half a surrogate pair, which is no character") from None
    if size > fields.limit and fields.chat is None:  # a text of a .parquet file; lines were checked before
        raise _BadDocumentError(too_long(fields.limit))
    return Document(text, path, key, source, spans)


def _field(record: dict[str, Any], name: str, types: type | tuple[type, ...], needed: str) -> Any:
    if name not in record:
        have = ", ".join(map(repr, list(record)[:8])) or "none"
        flag = "--messages-field" if types is list else "--json-key"
        raise _BadDocumentError(f"has no field {name!r} (it has {have}; see {flag})")
    if not isinstance(record[name], types):
        raise _BadDocumentError(f"field {name!r} is a {type(record[name]).__name__}, needs {needed}")
    return record[name]


def too_long(limit: int) -> str:
    """Return what is wrong with a document of more than `limit` bytes."""
    return f"longer than --max-document-bytes {limit}"
