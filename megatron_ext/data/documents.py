"""Documents out of .jsonl and .txt files, one at a time, with every bad line named by file and number."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_ext.errors import UserError

SUFFIXES = (".jsonl", ".txt")
PROBLEMS_KEPT = 10


@dataclass(frozen=True)
class Document:
    """A text and where it stands: a line of a .jsonl file (1-based), or a whole .txt file (line is None)."""

    text: str
    source: Path
    line: int | None


@dataclass
class ReadProgress:
    """What `read_documents` has done so far: bytes consumed, bad documents skipped, the first problems."""

    bytes_read: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    def skip(self, problem: str) -> None:
        self.skipped += 1
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)


class _BadDocumentError(Exception):
    """Why a document cannot be used; never leaves this file."""


def find_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The .jsonl and .txt files of `paths`; of a folder all inside it, recursively, sorted by their path.

    Raises:
        UserError: no path, one that does not exist, another kind of file, a folder without any.
    """
    if not paths:
        raise UserError("input: got no path; name .jsonl or .txt files, or folders of them")
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = (file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            found = sorted(inside, key=lambda file: file.relative_to(path).parts)
            if not found:
                raise UserError(f"input: folder {path} holds no .jsonl or .txt file; name another folder")
            files += found
        elif not path.exists():
            raise UserError(f"input: {path} does not exist; check the path")
        elif path.suffix not in SUFFIXES:
            raise UserError(f"input: {path} is neither .jsonl nor .txt; convert it, or rename it if it is one")
        else:
            files.append(path)
    return files


def read_documents(
    paths: Sequence[str | os.PathLike[str]],
    text_field: str = "text",
    on_bad: Literal["raise", "skip"] = "raise",
    progress: ReadProgress | None = None,
) -> Iterator[Document]:
    """Each document of the files, in order: one per line of a .jsonl file, one per .txt file.

    A bad document is invalid JSON or UTF-8, a missing or non-string field, or an empty text. Blank lines of a
    .jsonl file hold no document and are passed over; a byte-order mark is no part of a text.

    Args:
        paths: files and folders, see `find_files`.
        text_field: the field of a .jsonl line that holds its text.
        on_bad: "raise" stops at the first bad document, "skip" leaves it out and counts it in `progress`.
        progress: kept up to date as documents are handed out.

    Raises:
        UserError: a bad document, named as FILE:LINE (if on_bad is "raise"); a bad path.
    """
    seen = ReadProgress() if progress is None else progress
    for file in find_files(paths):
        for line, raw in _raw_documents(file, seen):
            try:
                text = _parse(raw, text_field if line else None)
            except _BadDocumentError as problem:
                place = f"{file}:{line}" if line else str(file)
                if on_bad == "raise":
                    remedy = "mend it, or pass --skip-bad-lines"
                    raise UserError(f"{place}: {problem}; {remedy}") from None
                seen.skip(f"{place}: {problem}")
            else:
                yield Document(text, file, line)


def _raw_documents(file: Path, progress: ReadProgress) -> Iterator[tuple[int | None, bytes]]:
    """(line number or None, bytes) of each document; progress.bytes_read moves on with them."""
    if file.suffix == ".txt":
        raw = file.read_bytes()
        progress.bytes_read += len(raw)
        yield None, raw.removeprefix(codecs.BOM_UTF8)
        return
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            progress.bytes_read += len(raw)
            if raw.strip():
                yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw


def _parse(raw: bytes, text_field: str | None) -> str:
    """The text in `raw`: the bytes themselves, or the field of the JSON object that they spell."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        where = f"byte {error.start + 1}" if text_field else f"line {line}"
        raise _BadDocumentError(f"invalid UTF-8 (0x{raw[error.start]:02x}) at {where}") from None
    if text_field is not None:
        text = _field(text, text_field)
    if not text:
        raise _BadDocumentError("the text is empty")
    return text


def _field(line: str, name: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadDocumentError(f"invalid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _BadDocumentError(f"invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise _BadDocumentError(f"holds a JSON {type(value).__name__}, needs an object with a field {name!r}")
    if name not in value:
        have = ", ".join(map(repr, list(value)[:8])) or "none"
        raise _BadDocumentError(f"has no field {name!r} (it has {have}; see --json-key)")
    text = value[name]
    if not isinstance(text, str):
        raise _BadDocumentError(f"field {name!r} is a {type(text).__name__}, needs a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadDocumentError(f"field {name!r} holds half a surrogate pair, which is no character") from None
    return text
