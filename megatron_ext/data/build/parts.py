"""Manage the folder PREFIX.parts, which has the finished parts of a data set that is being built.

A part is named by a digest of its inputs and settings: NAME.bin (token ids, or texts to be grouped), NAME.npz (index of
the content) and NAME.json (its report, written last). So `--resume` reuses exactly the parts that the run
would create again. In the code a part is the path of its files, without a suffix.
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.files.json_file import read_json

PROBLEMS_KEPT = 10
LOCK_FILE = "lock"


@dataclass
class Report:
    """Counts of what was written and omitted, for one part or for all.

    Attributes:
        sequences: sequences of the format: sentences, or whole documents.
        skipped, problems: the number of bad documents omitted, and descriptions of the first ones.
        too_short, too_long: documents omitted because of `min_tokens` and `max_tokens`.
        unanswered: conversations omitted because they have no assistant's token.
        trained: number of the assistant's tokens.
        reused: number of parts that an interrupted run had finished.
    """

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)
    too_short: int = 0
    too_long: int = 0
    unanswered: int = 0
    trained: int = 0
    reused: int = 0

    def add(self, other: Report) -> None:
        """Add the counts of a part."""
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)
        del self.problems[PROBLEMS_KEPT:]

    def skip(self, problem: str) -> None:
        """Count a bad document."""
        self.add(Report(skipped=1, problems=[problem]))

    def counts(self) -> dict[str, Any]:
        """Return what the metadata has of the report."""
        counts = asdict(self)
        del counts["reused"]
        return counts


def write_report(part: Path, report: Report, limit: int) -> None:
    """Write the report of a part whose other files are written, and the maximum length of a document, in bytes."""
    with atomic_write(part.with_suffix(".json")) as partial:
        partial.write_text(json.dumps({"limit": limit, "report": asdict(report)}), encoding="utf-8")


def read_report(part: Path) -> Report:
    """Read the report of a finished part."""
    return Report(**read_json(part.with_suffix(".json"))["report"])


def usable(part: Path, limit: int, skip: bool) -> bool:
    """Return whether the part is finished and would be the same with these options for bad documents.

    A document that was omitted as too long may be accepted with another limit.
    """
    path = part.with_suffix(".json")
    if not path.is_file():
        return False
    made_with = read_json(path)["limit"]
    return skip and limit == made_with if read_report(part).skipped else limit >= made_with


def finished_parts(folder: Path) -> int:
    """Return the number of finished parts in a work folder."""
    return len(list(folder.glob("*.json")))


@contextmanager
def work_folder(prefix: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Yield the folder PREFIX.parts, locked, and remove it at the end; after an exception finished parts are kept.

    Args:
        prefix: prefix of the data set.
        resume: use finished parts of an earlier run.
        overwrite: remove the parts of an earlier run.

    Raises:
        UserError: another run uses the folder, an earlier one left parts that may not be used, or it has other files.
    """
    folder = Path(f"{prefix}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / LOCK_FILE).exists():
        raise UserError(f"{folder}: the folder is for unfinished work and has other files; change the prefix")
    with (folder / LOCK_FILE).open("w") as lock:  # the kernel releases the lock if the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another run is writing this dataset; wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
                raise
        if finished_parts(folder) and not (resume or overwrite):
            raise UserError(
                f"{folder} holds an unfinished run; pass --resume to continue it, or --overwrite to start again"
            )
        for path in [] if resume else folder.iterdir():
            if path.name != LOCK_FILE:
                path.unlink()
        try:
            yield folder
        except BaseException as error:
            for path in folder.glob("dataset.*"):
                path.unlink()
            finished = finished_parts(folder)
            if not finished:
                shutil.rmtree(folder)
            elif isinstance(error, UserError):
                raise UserError(f"{error}; {finished} finished parts are kept, --resume continues from them") from None
            raise
        shutil.rmtree(folder)
