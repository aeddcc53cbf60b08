"""Build a corpus available on every machine: the sources of Python's standard library, one package per document.

The files of a package refer to each other, which makes long documents with long-range structure.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

LEFT_OUT = frozenset(
    (
        *("site-packages", "dist-packages", "ensurepip", "__pycache__"),
        *("test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3"),
    )
)
BUILD_DATA = "_sysconfigdata"  # generated when Python was built, so it differs between machines


@dataclass(frozen=True)
class CorpusReport:
    """The number of documents written, the bytes of the .jsonl file, and the documents omitted by the limit."""

    documents: int
    size_bytes: int
    left_out: int


def gather_corpus(
    output: str | os.PathLike[str],
    max_bytes: int | None = None,
    *,
    stdlib: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> CorpusReport:
    """Write the standard library's sources to `output`, a .jsonl file with the fields "name" and "text".

    Each top-level module is a document, and so is each top-level package: its files in sorted order, each after a line
    `# file: name`. Documents are ordered by a hash of their names, so that any contiguous part is a fair sample.

    Args:
        output: the .jsonl file.
        max_bytes: stop before the document that would exceed this file size.
        stdlib: the library's folder; None for that of the running Python.
        overwrite: replace an existing `output`.

    Raises:
        UserError: `output` exists or is not named .jsonl, this machine has no sources, or the limit is too small.
    """
    target = Path(output)
    if target.suffix != ".jsonl":
        raise UserError(f"output: {target} must end in .jsonl, the format that tools/preprocess_data.py reads")
    if target.exists() and not overwrite:
        raise UserError(f"output: {target} exists; pass --overwrite or another --output")
    root = Path(stdlib or sysconfig.get_path("stdlib"))
    sources = [entry for entry in root.glob("*") if _is_source(entry)]
    sources.sort(key=lambda entry: (hashlib.sha256(entry.stem.encode()).digest(), entry.name))
    texts = [(entry.stem, "\n".join(_files(root, entry))) for entry in sources]
    lines = [
        json.dumps({"name": name, "text": text}, ensure_ascii=False).encode() + b"\n" for name, text in texts if text
    ]
    if not lines:
        raise UserError(
            f"stdlib: {root} holds no Python sources (minimal images leave them out); "
            "install Python's full standard library, or use texts of your own"
        )
    # not even later, smaller documents, which would bias the end of the corpus
    fitting = sum(size <= (size if max_bytes is None else max_bytes) for size in accumulate(map(len, lines)))
    if not fitting:
        raise UserError(f"max_bytes: got {max_bytes}, but the first document alone has {len(lines[0])} bytes")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as partial, partial.open("wb") as file:
        file.writelines(lines[:fitting])
    return CorpusReport(fitting, sum(map(len, lines[:fitting])), len(lines) - fitting)


def _is_source(entry: Path) -> bool:
    """Return whether a top-level entry is a module or a package of the corpus."""
    if entry.name in LEFT_OUT or entry.name.startswith(BUILD_DATA):
        return False
    return entry.suffix == ".py" if entry.is_file() else entry.name.isidentifier()


def _files(root: Path, entry: Path) -> Iterator[str]:
    """Yield each non-empty source of a module or package after a line with its name; skip files that are not UTF-8."""
    files = [entry] if entry.is_file() else entry.rglob("*.py")
    for file in sorted(files, key=lambda file: file.relative_to(root).parts):
        parts = file.relative_to(root).parts
        if LEFT_OUT.intersection(parts) or not file.is_file():
            continue
        try:
            source = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if source.strip():
            yield f"# file: {'/'.join(parts)}\n{source}"
