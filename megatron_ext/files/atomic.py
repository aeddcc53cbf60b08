"""Write files and folders atomically: under another name, forced to disk, then renamed.

path.4711.partial   being written; a killed process leaves it behind, and nothing reads it
path                at every moment the old content or the new one
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(paths: Iterable[Path]) -> None:
    """Force files to disk, and the names in folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the path to write to, which is renamed to `path` at the end and removed after an exception.

    Several processes may write the same `path`: the last one to end wins.

    Args:
        path: the final name.
        durable: force the file to disk first.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if durable:
            sync([partial])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield the folder to write into, which is renamed to `path` at the end and removed after an exception.

    Args:
        path: the final name.
        replace: replace a folder that has the name; False: keep that one, and drop this.
    """
    # processes of several machines may make the same folder, so a process id would not do
    partial, old = (path.with_name(f"{path.name}.{secrets.token_hex(8)}.{end}") for end in ("partial", "old"))
    partial.mkdir(parents=True)
    try:
        yield partial
        sync([*partial.rglob("*"), partial])
        if replace:
            move_in(partial, path, old)
        else:
            try:
                partial.rename(path)  # fails where a folder that is not empty has the name
            except OSError:
                if not path.exists():
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def move_in(new: Path, path: Path, old: Path) -> None:
    """Rename the folder `new` to `path`, and what has that name to `old`, for the caller to remove.

    A folder cannot replace another one in a single step: after a kill between the two renames, only `old` exists.
    """
    if path.exists():
        path.rename(old)
    new.rename(path)
