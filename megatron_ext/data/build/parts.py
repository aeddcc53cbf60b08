"""Manage the folder PREFIX.parts, which has the finished parts of a data set that is being built.

A part is named by a digest of its inputs and settings: NAME.bin (token ids, or texts to be grouped), NAME.npz or .npy
(index of the content) and NAME.json (its record, written last). So `--resume` reuses exactly the parts that the run
would create again. In the code a part is the path of its files, without a suffix.
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

PROBLEMS_KEPT = 10
MASK, SOURCES = ".mask.npy", ".sources.npy"
LOCK_FILE = "lock"


@dataclass(frozen=True)
class Settings:
    """All settings that determine the content of a data set, apart from its inputs.

    Attributes:
        chat_template: fingerprint of the template; if given, the data set has a mask of the assistant's tokens.
        bos_id: the token that documents begin with.
        source_field: if given, the data set has the source of each document, the value of this field.
    """

    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    text_field: str
    concat_by: str | None
    sentences: str | None
    min_tokens: int
    max_tokens: int | None
    chat_template: str | None = None
    bos_id: int | None = None
    source_field: str | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids on disk, by Megatron's rule."""
        return np.dtype(np.uint16 if self.vocab_size < 65500 else np.int32)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of the files of the data set; .idx is written last."""
        mask, sources = self.chat_template is not None, self.source_field is not None
        return (".bin", *[MASK] * mask, *[SOURCES] * sources, ".json", ".idx")


@dataclass
class Counts:
    """Counts of what was written and omitted, for one shard or for all.

    Attributes:
        sequences: sequences of the format: sentences, or whole documents.
        skipped, problems: the number of bad documents omitted, and descriptions of the first ones.
        too_short, too_long: documents omitted because of `min_tokens` and `max_tokens`.
        unanswered: conversations omitted because they have no assistant's token.
        trained: number of the assistant's tokens.
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

    def counts(self) -> dict[str, Any]:
        """Return these counts by name, without those added by a subclass."""
        return {known.name: getattr(self, known.name) for known in fields(Counts)}

    def add(self, other: Counts) -> None:
        """Add the counts of another shard."""
        for name, number in other.counts().items():
            setattr(self, name, getattr(self, name) + number)
        del self.problems[PROBLEMS_KEPT:]

    def skip(self, problem: str) -> None:
        """Count a bad document."""
        self.add(Counts(skipped=1, problems=[problem]))


@dataclass
class Record(Counts):
    """The content of a part and its inputs.

    Attributes:
        size: bytes of text.
        limit: the maximum length of a document, in bytes.
    """

    size: int = 0
    limit: int = 0

    @classmethod
    def read(cls, part: Path) -> Record:
        """Read the record of a finished part."""
        return cls(**json.loads(part.with_suffix(".json").read_text(encoding="utf-8")))

    def write(self, part: Path) -> None:
        """Write the record of a part whose other files are written."""
        with atomic_write(part.with_suffix(".json")) as partial:
            partial.write_text(json.dumps(asdict(self)), encoding="utf-8")


def usable(part: Path, limit: int, skip: bool) -> bool:
    """Return whether the part is finished and would be the same with these options for bad documents.

    A document that was omitted as too long may be accepted with another limit.
    """
    if not part.with_suffix(".json").is_file():
        return False
    record = Record.read(part)
    return skip and limit == record.limit if record.skipped else limit >= record.limit


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
        finished = False
        try:
            yield folder
            finished = True
        finally:
            if finished or not finished_parts(folder):
                shutil.rmtree(folder)
            else:
                for path in folder.glob("dataset.*"):
                    path.unlink()
