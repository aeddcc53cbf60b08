"""Read files of JSON lines, and cut them back: one line is one object with an integer `step`, which never decreases."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

from pydantic_core import from_json

from megatron_ext.errors import UserError
from megatron_ext.files.reading import JsonObject


def read_jsonl(path: Path) -> list[JsonObject]:
    """Read the objects of a JSON-lines file, in order; an incomplete last line (no newline yet) is skipped.

    Raises:
        UserError: a complete line is not a JSON object with an integer `step`; the message names the file and the line.
        FileNotFoundError: there is no such file.
    """
    return list(iterate_jsonl(path))


def cut_back(path: Path, end_step: float) -> None:
    """Remove the lines at the end of a file whose `step` is `end_step` or more, and an incomplete last line.

    Steps never decrease in a file, so only these lines and the one before them are read, however long the file is. A
    missing file stays missing; kept lines are unchanged, byte for byte. Raises as `read_jsonl` for a corrupt line among
    those that are read; nothing is changed then.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            kept = _end_of_kept(path, content, end_step)
            lacks_newline = kept > 0 and content[kept - 1 : kept] != b"\n"
        file.truncate(kept)
        if lacks_newline:
            file.seek(kept)
            file.write(b"\n")


def _end_of_kept(path: Path, content: mmap.mmap, end_step: float) -> int:
    """Return the number of bytes before the lines that `cut_back` removes."""
    end = len(content)
    while end > 0:
        start = content.rfind(b"\n", 0, end - 1) + 1
        line = content[start:end]
        record = _parse(line)
        if record is None and line.strip() and line.endswith(b"\n"):
            raise _corrupt(path, content[:start].count(b"\n") + 1, line)
        if record is not None and record["step"] < end_step:
            break
        end = start
    return end


def iterate_jsonl(path: Path) -> Iterator[JsonObject]:
    """Yield the record of each complete line."""
    with path.open("rb") as file:  # line by line: the file of a long run may not fit in memory
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            if record is not None:
                yield record
            elif line.strip() and line.endswith(b"\n"):  # an incomplete last line is no error
                raise _corrupt(path, number, line)


def _parse(line: bytes) -> JsonObject | None:
    """Return the object of a line, with or without its newline; None if it is no object with an integer step."""
    try:
        record = from_json(line)  # five times as fast as json.loads
    except ValueError:
        try:  # from_json refuses half of a surrogate pair, which a path that is not UTF-8 may have
            record = json.loads(line.decode())
        except ValueError:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    if type(step) is not int or abs(step) >= 2**53:
        return None
    return record


def _corrupt(path: Path, number: int, line: bytes) -> UserError:
    text = line[:60].removesuffix(b"\n").decode("utf-8", errors="replace")
    if len(line) > 60:
        text += "..."
    return UserError(
        f"{path}, line {number}: got {text!r}, needs one JSON object with an integer step; "
        "restore the file from a copy or delete that line"
    )
