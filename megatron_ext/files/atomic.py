"""Write files and folders atomically: under a temporary name, synced to disk, then renamed.

path.4711.partial   being written; a killed process leaves it behind, and nothing reads it
path                always either the old or the new content
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

from megatron_ext.errors import DISK_FULL


def sync(paths: Iterable[Path]) -> None:
    """Sync files, and the entries of folders, to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(file: FileIO, content: bytes) -> None:
    """Write to an unbuffered file: a buffer whose flush has failed would be flushed again when the file is closed.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    unwritten = memoryview(content)
    try:
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None


@contextlib.contextmanager
def _named(partial: Path, path: Path) -> Iterator[None]:
    """Name `path` in errors about `partial`, which users do not know."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(str(partial), str(path))
        elif error.errno in DISK_FULL:  # a failed write does not name its file
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` at the end and removed after an exception.

    Several processes may write the same `path`: the last one to finish wins.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with _named(partial, path):
            yield partial
            sync([partial])
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # after an error of writing, that one counts
            partial.unlink()


@contextlib.contextmanager
def atomic_folder(path: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` at the end and removed after an exception.

    Args:
        path: the final name.
        replace: replace an existing folder; if False, keep the existing folder and discard the new one.
    """
    # random, not a process id: processes on several machines may make the same folder
    unique = f"{path.name}.{secrets.token_hex(8)}"
    partial = path.with_name(f"{unique}.partial")
    old = path.with_name(f"{unique}.old")
    try:
        with _named(partial, path):
            partial.mkdir(parents=True)
            yield partial
            sync([*partial.rglob("*"), partial])
            if replace and path.exists():  # one folder cannot replace another: if killed between the two, `old` exists
                path.rename(old)
            try:
                partial.rename(path)  # fails if `path` is a non-empty folder
            except OSError:
                if replace or not path.exists():
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
