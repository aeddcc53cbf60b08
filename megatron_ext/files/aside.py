"""Files and folders that are complete or absent: written under another name, forced to disk, then renamed.

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
    """Force files to disk, and of folders the names of what lies in them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def file_aside(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give the path to write to; at the end it is renamed to `path`, after an exception it is gone.

    Several processes may write the same `path`: each has a name of its own aside, and the last one to end stays.

    Args:
        path: what the file is called in the end.
        durable: force it to disk first; False where a reader checks the content anyway.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        if durable:
            sync([aside])
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_aside(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """Give the folder to write into; at the end it is `path`, after an exception it is gone.

    Args:
        path: what the folder is called in the end.
        replace: remove what another process has put there meanwhile; False: leave that, and drop this one.
    """
    # processes of several machines may make the same folder, so a process id would not do
    aside, old = (path.with_name(f"{path.name}.{secrets.token_hex(8)}.{end}") for end in ("partial", "old"))
    aside.mkdir(parents=True)
    try:
        yield aside
        sync([*aside.rglob("*"), aside])
        if replace:
            move_in(aside, path, old)
        else:
            try:
                aside.rename(path)  # fails where a folder that is not empty has the name already
            except OSError:
                if not path.exists():
                    raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def move_in(aside: Path, path: Path, old: Path) -> None:
    """Rename a whole folder to `path`, and what stands there to `old`, for the caller to remove.

    A folder cannot replace another one in a single step: killed between the two renames, only `old` is there.
    """
    if path.exists():
        path.rename(old)
    aside.rename(path)
