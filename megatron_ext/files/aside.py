"""A file that is complete or absent: written under another name, forced to disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """The path to write to; at the end it is renamed to `path`, after an exception it is gone.

    `path` holds the old content or the new one at every moment, also where several processes write it. A killed
    one leaves PATH.<its id>.partial, which nothing reads.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
