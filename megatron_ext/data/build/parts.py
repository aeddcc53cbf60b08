"""The folder PREFIX.parts: finished parts of a dataset in the making, each complete or absent.

A part is three files, named by a digest of what it was made from and how: NAME.bin (token ids, or texts to be
grouped), NAME.npz (where what lies in it) and NAME.json (its record, renamed into place last). So whoever would
make the same part can use it again, and nobody else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron_ext.data.text.documents import ReadProgress
from megatron_ext.data.text.sources import BLOCK, LOCK_FILE, WORK_SUFFIX, Source
from megatron_ext.errors import UserError
from megatron_ext.files.aside import file_aside

SETTINGS_FILE = "settings.json"
OURS = re.compile(r"lock|settings\.json|copy-\d+\.jsonl|dataset[.\w]+|[0-9a-f]{32}\.(bin|npz|json)(\.\d+\.partial)?")


@dataclass(frozen=True)
class Settings:
    """Holds all that decides the content of a dataset, beside its inputs."""

    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    text_field: str
    concat_by: str | None
    sentences: str | None
    min_tokens: int
    max_tokens: int | None
    chat_template: str | None = None  # its fingerprint: the dataset has a mask of what the assistant says
    bos_id: int | None = None  # what documents begin with
    source_field: str | None = None  # the dataset has the source of each document, by the value of this field

    def are_those_of(self, card: Mapping[str, Any]) -> bool:
        """Say whether a card tells of these settings; one of before an option had its default."""
        defaults = {known.name: known.default for known in fields(Settings)}
        return all(card.get(name, defaults[name]) == value for name, value in asdict(self).items())

    @property
    def dtype(self) -> type[np.uint16] | type[np.int32]:
        """The type of the ids on disk, by Megatron's rule."""
        return np.uint16 if self.vocab_size < 65500 else np.int32


@dataclass
class Counts:
    """Counts what came out and what was left out: of one shard, or of all.

    Attributes:
        sequences: of the format: sentences, or whole documents.
        skipped, problems: bad documents left out, and the first of them.
        too_short, too_long: documents left out by `min_tokens` and `max_tokens`.
        unanswered: conversations left out because no token is the assistant's.
        trained: tokens of the assistants.
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
        """Return these numbers by their names, without those that a subclass adds."""
        return {known.name: getattr(self, known.name) for known in fields(Counts)}


@dataclass
class Record(Counts):
    """Tells what a part holds and what it was made from.

    Attributes:
        size: bytes of text.
        limit: the longest document that was allowed, in bytes.
        checksums: SHA-256 of the sources that begin in it, by path.
        crc: of its two files, to see damage.
    """

    size: int = 0
    limit: int = 0
    checksums: dict[str, str] = field(default_factory=dict)
    crc: list[int] = field(default_factory=list)

    def read(self, progress: ReadProgress, sources: Iterable[Source]) -> None:
        """Note what reading has left out, and the checksums of the sources that were begun."""
        self.skipped, self.problems = progress.skipped, progress.problems
        self.checksums = {source.name: source.checksum() for source in sources}


@dataclass(frozen=True)
class Part:
    """Names a part's files."""

    folder: Path
    name: str

    @classmethod
    def named(cls, folder: Path, settings: Settings, *identity: str) -> Part:
        """Name the part that is made by `settings` from what `identity` stands for."""
        content = json.dumps([asdict(settings), *identity])
        return cls(folder, hashlib.sha256(content.encode()).hexdigest()[:32])

    @property
    def content(self) -> Path:
        return self.folder / f"{self.name}.bin"

    @property
    def arrays(self) -> Path:
        return self.folder / f"{self.name}.npz"

    @property
    def record_file(self) -> Path:
        return self.folder / f"{self.name}.json"

    def record(self) -> Record:
        """Read the record of a finished part."""
        return Record(**json.loads(self.record_file.read_text(encoding="utf-8")))

    def usable(self, limit: int, skip: bool) -> bool:
        """Say whether the part is finished, whole, and what would be made with these options on bad documents."""
        try:
            record = self.record()
            whole = record.crc == [_crc(self.content), _crc(self.arrays)]
        except (OSError, ValueError, TypeError):
            return False
        return whole and same_when_bad(record.skipped, record.limit, limit, skip)


def same_when_bad(skipped: int, made_with: int, limit: int, skip: bool) -> bool:
    """Say whether `limit` and `skip` would make what the bound `made_with` made, `skipped` bad documents left out.

    What was skipped as too long may be good under another bound.
    """
    return skip and limit == made_with if skipped else limit >= made_with


class PartWriter:
    """Writes a part aside; the end of the block renames it into place, or removes it after an exception.

    Nothing is forced to disk: the checksums in the record tell a part that a power cut tore.
    """

    def __init__(self, part: Part) -> None:
        self._renames = ExitStack()
        # the stack unwinds from its end, so that the record is the last to get its name
        self._record_file, self._arrays, content = (
            self._renames.enter_context(file_aside(path, durable=False))
            for path in (part.record_file, part.arrays, part.content)
        )
        self._file = content.open("wb", buffering=BLOCK)
        self._crc = 0

    def __enter__(self) -> PartWriter:
        return self

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._crc = zlib.crc32(content, self._crc)

    def finish(self, record: Record, **arrays: np.ndarray) -> None:
        """Complete the part with these arrays and this record; every block ends with it."""
        self._file.close()
        with self._arrays.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        record.crc = [self._crc, _crc(self._arrays)]
        self._record_file.write_text(json.dumps(asdict(record)), encoding="utf-8")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # of a full disk, which has been told already
            self._file.close()
        self._renames.__exit__(kind, error, trace)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


class WorkFolder:
    """PREFIX.parts, locked while it is in use.

    Args:
        prefix: of the dataset.
        resume: use finished parts of an earlier run with the same settings; otherwise there must be none.
        overwrite: throw away the parts of an earlier run.

    Raises:
        UserError: another run is at work here, or an earlier one left parts that are not to be used.
    """

    def __init__(self, prefix: str, settings: Settings, *, resume: bool, overwrite: bool) -> None:
        self.path = Path(f"{prefix}{WORK_SUFFIX}")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / LOCK_FILE).open("w")  # the kernel lets go of it where a process is killed
        try:
            self._claim(settings, resume, overwrite)
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, settings: Settings, resume: bool, overwrite: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another run is writing this dataset; wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
                raise
        earlier: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # there is none, or it was stopped before its first part
            earlier = json.loads((self.path / SETTINGS_FILE).read_text(encoding="utf-8"))
        if not isinstance(earlier, dict):
            earlier = {}
        strange = [path for path in self.path.iterdir() if not OURS.fullmatch(path.name)]
        if strange:
            raise UserError(
                f"{strange[0]}: the folder is for unfinished work alone; move the file or change the prefix"
            )
        if earlier and resume:
            for name, value in asdict(settings).items():
                if earlier.get(name) != value:
                    raise UserError(
                        f"resume: {self.path} was begun with {name} {earlier.get(name)}, now it is {value}; "
                        "pass what it was begun with, or --overwrite instead of --resume to start again"
                    )
        elif earlier and not overwrite:
            raise UserError(
                f"{self.path} holds an unfinished run; pass --resume to go on, or --overwrite to start again"
            )
        self._clear(all_of_it=not (earlier and resume))
        (self.path / SETTINGS_FILE).write_text(json.dumps(asdict(settings)), encoding="utf-8")

    @property
    def finished(self) -> int:
        """The number of finished parts."""
        return len(list(self.path.glob("*.npz")))

    def close(self, *, remove: bool) -> None:
        """Give the folder up: remove it, or what is unfinished in it."""
        if remove:
            shutil.rmtree(self.path)
        else:
            self._clear(all_of_it=False)
        self._lock.close()

    def _clear(self, *, all_of_it: bool) -> None:
        for path in self.path.iterdir():
            unfinished = path.name.startswith(("copy-", "dataset.")) or path.suffix == ".partial"
            if path.name != LOCK_FILE and (all_of_it or unfinished):
                path.unlink()
