"""Manage the folder PREFIX.parts, which has the finished parts of a data set that is being built.

A part is named by a digest of its inputs and settings: NAME.bin (token ids, or texts to be grouped), NAME.npz or .npy
(index of the content) and NAME.json (its record, written last). So `--resume` reuses exactly the parts that the run
would create again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.data.text.documents import ReadProgress
from megatron_ext.data.text.sources import LOCK_FILE, WORK_SUFFIX, Source
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

SETTINGS_FILE = "settings"


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

    def are_those_of(self, card: Mapping[str, Any]) -> bool:
        """Return whether a data set's metadata has these settings."""
        return all(name in card and card[name] == value for name, value in asdict(self).items())

    @property
    def dtype(self) -> type[np.uint16] | type[np.int32]:
        """The dtype of the ids on disk, by Megatron's rule."""
        return np.uint16 if self.vocab_size < 65500 else np.int32


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


@dataclass
class Record(Counts):
    """The content of a part and its inputs.

    Attributes:
        size: bytes of text.
        limit: the maximum length of a document, in bytes.
        checksums: SHA-256 of the sources that begin in the part, by name.
    """

    size: int = 0
    limit: int = 0
    checksums: dict[str, str] = field(default_factory=dict)

    def read(self, progress: ReadProgress, sources: Iterable[Source]) -> None:
        """Record the omitted documents, and the checksums of the sources."""
        self.skipped, self.problems = progress.skipped, progress.problems
        self.checksums = {source.name: source.checksum() for source in sources}


@dataclass(frozen=True)
class Part:
    """The files of a part."""

    folder: Path
    name: str

    @classmethod
    def named(cls, folder: Path, settings: Settings, *identity: str) -> Part:
        """Return the part that `settings` create from the inputs described by `identity`."""
        content = json.dumps([asdict(settings), *identity])
        return cls(folder, hashlib.sha256(content.encode()).hexdigest()[:32])

    @property
    def content(self) -> Path:
        return self.folder / f"{self.name}.bin"

    @property
    def arrays(self) -> Path:
        return self.folder / f"{self.name}.npz"

    @property
    def rows(self) -> Path:
        return self.folder / f"{self.name}.npy"

    @property
    def record_file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def record(self) -> Record:
        """Read the record of a finished part."""
        return Record(**json.loads(self.record_file.read_text(encoding="utf-8")))

    def finish(self, record: Record, **arrays: np.ndarray) -> None:
        """Write the arrays of a part whose content is written, and then its record."""
        with atomic_write(self.arrays) as aside, aside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        with atomic_write(self.record_file) as aside:
            aside.write_text(json.dumps(asdict(record)), encoding="utf-8")

    def usable(self, limit: int, skip: bool) -> bool:
        """Return whether the part is finished and would be the same with these options for bad documents."""
        if not self.record_file.is_file():
            return False
        record = self.record()
        return same_when_bad(record.skipped, record.limit, limit, skip)


def same_when_bad(skipped: int, made_with: int, limit: int, skip: bool) -> bool:
    """Return whether `limit` and `skip` give the same result as in an earlier run.

    That run had the limit `made_with` and omitted `skipped` documents. A document that was omitted as too long may be
    accepted with another limit.
    """
    return skip and limit == made_with if skipped else limit >= made_with


class WorkFolder:
    """The folder PREFIX.parts, locked while in use.

    Args:
        prefix: prefix of the data set.
        settings: settings of this run.
        resume: use finished parts of an earlier run with the same settings.
        overwrite: remove the parts of an earlier run.

    Raises:
        UserError: another run uses the folder, an earlier one left parts that may not be used, or it has other files.
    """

    def __init__(self, prefix: str, settings: Settings, *, resume: bool, overwrite: bool) -> None:
        self.path = Path(f"{prefix}{WORK_SUFFIX}")
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / LOCK_FILE).exists():
            raise UserError(f"{self.path}: the folder is for unfinished work and has other files; change the prefix")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / LOCK_FILE).open("w")  # the kernel releases the lock if the process is killed
        try:
            self._claim(asdict(settings), resume, overwrite)
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, settings: dict[str, Any], resume: bool, overwrite: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another run is writing this dataset; wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
                raise
        earlier: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # missing or truncated
            earlier = json.loads((self.path / SETTINGS_FILE).read_text(encoding="utf-8"))
        if earlier and not (resume or overwrite):
            raise UserError(
                f"{self.path} holds an unfinished run; pass --resume to continue it, or --overwrite to start again"
            )
        changed = [name for name, value in settings.items() if earlier.get(name) != value] if earlier else []
        if resume and changed:
            name = changed[0]
            raise UserError(
                f"resume: {self.path} was begun with {name} {earlier.get(name)}, now it is {settings[name]}; "
                "pass what it was begun with, or --overwrite instead of --resume to start again"
            )
        if not resume:
            self._remove("*")
        (self.path / SETTINGS_FILE).write_text(json.dumps(settings), encoding="utf-8")

    @property
    def finished(self) -> int:
        """The number of finished parts."""
        return len(list(self.path.glob("*.json")))

    def close(self, *, remove: bool) -> None:
        """Remove the folder, or only the files that a later run cannot use."""
        if remove:
            shutil.rmtree(self.path)
        else:
            self._remove("dataset.*")
        self._lock.close()

    def _remove(self, pattern: str) -> None:
        for path in self.path.glob(pattern):
            if path.name != LOCK_FILE:
                path.unlink()
