"""Manage the folder PREFIX.parts, which has the finished parts of a data set that is being built.

A part is named by a digest of its inputs and settings, so `--resume` reuses exactly the parts that the run would create
again. NAME.bin has its content (token ids, or texts to be grouped), NAME.npz the index of the content and its report;
it is written last. In the code a part is the path of its files, without a suffix.
"""

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from megatron_ext.errors import DISK_FULL, UserError
from megatron_ext.files.atomic import atomic_write

PROBLEMS_KEPT = 10
LOCK_FILE = "lock"


@dataclass
class Report:
    """Counts of what was written and omitted, for one part or for all."""

    documents: int = 0
    sequences: int = 0  # sequences of the format: sentences, or whole documents
    tokens: int = 0
    # skipped, problems: the number of bad documents omitted, and descriptions of the first ones
    skipped: int = 0
    problems: list[str] = field(default_factory=list)
    # too_short, too_long: documents omitted because of `min_tokens` and `max_tokens`
    too_short: int = 0
    too_long: int = 0
    unanswered: int = 0  # conversations omitted because they have no assistant's token
    trained: int = 0  # number of the assistant's tokens
    reused: int = 0  # number of parts that an interrupted run had finished

    def add(self, other: "Report") -> None:
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)
        del self.problems[PROBLEMS_KEPT:]

    def skip(self, problem: str) -> None:
        self.add(Report(skipped=1, problems=[problem]))


def finish_part(part: Path, arrays: Mapping[str, np.ndarray], report: Report, limit: int) -> None:
    """Write the index and the report of a part; `limit` is the maximum length of a document, in bytes."""
    about = json.dumps({"limit": limit, "report": asdict(report)})
    with atomic_write(part.with_suffix(".npz")) as partial, partial.open("wb") as file:
        np.savez(file, about=np.array(about), **arrays)  # type: ignore[arg-type]


def read_report(part: Path) -> tuple[Report, int]:
    """Read the report of a finished part, and its limit."""
    with np.load(part.with_suffix(".npz")) as arrays:
        about = json.loads(arrays["about"].item())
    return Report(**about["report"]), about["limit"]


def usable(part: Path, limit: int, skip: bool) -> bool:
    """Return whether the part is finished and would be the same with these options for bad documents.

    A document that was omitted as too long may be accepted with another limit.
    """
    if not part.with_suffix(".npz").is_file():
        return False
    report, made_with = read_report(part)
    return skip and limit == made_with if report.skipped else limit >= made_with


@contextmanager
def work_folder(prefix: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """Yield the folder PREFIX.parts, locked, and remove it at the end; after an exception finished parts are kept.

    Raises UserError if another run uses the folder, if an earlier one left parts and neither `resume` (use them) nor
    `overwrite` (remove them) is given, or if it has other files.
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
        if any(folder.glob("*.npz")) and not (resume or overwrite):
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
            finished = len(list(folder.glob("*.npz")))
            if not finished:
                shutil.rmtree(folder)
            if isinstance(error, OSError) and error.errno in DISK_FULL:  # a failed write does not name its file
                error.filename = error.filename or str(folder)
            elif isinstance(error, UserError) and finished:
                raise UserError(f"{error}; {finished} finished parts are kept, --resume continues from them") from None
            raise
        shutil.rmtree(folder)
