"""Gather the Python standard library's sources into a .jsonl corpus, one package per document.

python tools/gather_corpus.py --output data/corpus.jsonl --max-bytes 4000000

The files of a package refer to each other, which makes long documents with long-range structure.
"""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from megatron_ext.cli import Parser, check_new, command, output_file
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

LEFT_OUT = {
    *("site-packages", "dist-packages", "ensurepip", "__pycache__"),
    *("test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3"),
}
BUILD_DATA = "_sysconfigdata"  # generated when Python was built, so it differs between machines


def gather_corpus(
    target: Path, max_bytes: int | None = None, *, stdlib: Path | None = None, overwrite: bool = False
) -> tuple[int, int]:
    """Write the library's sources to `target`, a .jsonl file with the fields "name" and "text", until `max_bytes`.

    Each top-level module is a document, and so is each top-level package: its files in sorted order, each after a line
    `# file: name`. Documents are ordered by a hash of their names, so that any contiguous part is a fair sample.
    Returns the number of documents written, and of those omitted because of `max_bytes`.
    """
    check_new(target, overwrite)
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    sources = [
        entry
        for entry in root.glob("*")
        if entry.name not in LEFT_OUT
        and not entry.name.startswith(BUILD_DATA)
        and (entry.suffix == ".py" if entry.is_file() else entry.name.isidentifier())
    ]
    sources.sort(key=lambda entry: (hashlib.sha256(entry.stem.encode()).digest(), entry.name))
    texts = [(entry.stem, "\n".join(_files(root, entry))) for entry in sources]
    lines = [
        json.dumps({"name": name, "text": text}, ensure_ascii=False).encode() + b"\n" for name, text in texts if text
    ]
    if not lines:
        raise UserError(f"stdlib: {root} holds no Python sources; install Python's full standard library")
    # not even later, smaller documents, which would bias the end of the corpus
    fitting = sum(max_bytes is None or size <= max_bytes for size in accumulate(map(len, lines)))
    if not fitting:
        raise UserError(f"max_bytes: got {max_bytes}, but the first document alone has {len(lines[0])} bytes")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as partial, partial.open("wb") as file:
        file.writelines(lines[:fitting])
    return fitting, len(lines) - fitting


def _files(root: Path, entry: Path) -> Iterator[str]:
    """Yield each non-empty source of a module or package after a line with its name; skip files that are not UTF-8."""
    files = [entry] if entry.is_file() else entry.rglob("*.py")
    for parts, file in sorted((file.relative_to(root).parts, file) for file in files):
        if LEFT_OUT.intersection(parts) or not file.is_file():
            continue
        try:
            source = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if source.strip():
            yield f"# file: {'/'.join(parts)}\n{source}"


@command
def main(argv: list[str]) -> int:
    parser = Parser(description="Gather the standard library's sources, one package per document.")
    parser.add_argument("--output", required=True, type=output_file(".jsonl"), metavar="FILE", help="the file to write")
    parser.add_argument("--max-bytes", type=int, help="keep the file below this size (default: everything)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    args = parser.parse_args(argv)
    documents, omitted = gather_corpus(args.output, args.max_bytes, overwrite=args.overwrite)
    print(f"{args.output}: {documents:,} documents, {omitted:,} omitted")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
