"""Write and check the manifest of a checkpoint folder.

    iter_0000040/manifest.json   {"sha256": of all the rest, "format": 2, "step": 40, ..., "files": {name: ...}}

The manifest is written last, before the folder is renamed to its final name. It lists every other file with its size
and SHA-256 and contains its own checksum, so that a corrupted file, including this one, is detected and named.
"""

import functools
import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import NonNegativeInt

import megatron_ext
from megatron_ext import heartbeat
from megatron_ext.errors import PERMANENT, UserError, echo, installed_version
from megatron_ext.files.atomic import sync
from megatron_ext.files.reading import typed

MANIFEST = "manifest.json"
FORMAT = 2


@dataclass(frozen=True)
class FileFacts:
    """The size of a file in bytes, and its SHA-256 in hexadecimal."""

    size: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint except tensors."""

    # step, consumed_samples: completed optimizer steps and the rows that they consumed
    step: NonNegativeInt
    consumed_samples: NonNegativeInt
    layout: dict[str, Any]  # sizes of the process grid that wrote it (tensor, pipeline, context, data, device)
    config: dict[str, dict[str, Any]]  # the run's configuration, section by section
    optimizer: dict[str, Any]  # the optimizer's counters; empty in a checkpoint of weights only
    code: dict[str, str]  # versions of the software that wrote it, and the SHA-256 of this package's sources
    files: dict[str, FileFacts]  # every other file of the folder
    seconds: float  # duration of writing
    data: tuple[str, ...] = ()  # fingerprints of the data sets, in order
    # the state of the trainer's callbacks, such as the losses used to detect spikes
    trainer_state: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest's content; it distinguishes two checkpoints of one step."""
        return _digest(asdict(self))

    def write(self, folder: Path) -> None:
        """Write manifest.json and flush it to disk."""
        path = folder / MANIFEST
        with path.open("w", encoding="utf-8") as file:
            json.dump({"sha256": self.digest} | asdict(self), file, indent=1)
        sync([path])

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and check manifest.json itself; the other files are not checked.

        Raises:
            UserError: it is missing, damaged, of another format, or names files outside the folder.
        """
        path = folder / MANIFEST
        values: Any = None
        with readable(path), suppress(ValueError):
            values = json.loads(path.read_bytes())
        if not isinstance(values, dict) or values.pop("sha256", None) != _digest(values):
            raise UserError(
                f"load: {path} is damaged: it is no JSON, or its own checksum differs; take another checkpoint"
            )
        if values.get("format") != FORMAT:
            raise UserError(
                f"load: {path} has format {echo(values.get('format'))}, this version reads {FORMAT}; use its version"
            )
        names = {field.name for field in fields(cls)}  # a later version may have added other fields
        manifest = typed({name: value for name, value in values.items() if name in names}, cls, path)
        for name in manifest.files:
            check_inside(name, path, "load")
        return manifest

    def check_optimizer(self, folder: Path, remedy: str) -> None:
        """Raise UserError if there is no optimizer state, as in checkpoints of tools/convert_checkpoint.py."""
        if not self.optimizer:
            raise UserError(f"load: {folder} holds weights alone, needs an optimizer's state; {remedy}")

    def check_files(self, folder: Path, names: Iterable[str], *, content: bool) -> None:
        """Compare the sizes of some of the files and, with `content`, their checksums.

        Raises:
            UserError: one is missing, cannot be read or differs; the message names it.
            OSError: the file system failed; another attempt may succeed.
        """
        for name in names:
            path = folder / name
            with readable(path):
                if path.stat().st_size != self.files[name].size:
                    damage = "size"
                elif content and facts_of(path) != self.files[name]:
                    damage = "checksum"
                else:
                    continue
            raise UserError(f"load: {path} is damaged: its {damage} differs; take another checkpoint")


def check_inside(name: Any, source: Path, field: str) -> None:
    """Raise UserError unless `name`, read from the file `source`, is a relative path inside that file's folder.

    Only the name is checked: the file may be a link created by the owner of the folder. `field` begins the message.
    """
    path = None
    if isinstance(name, str):
        path = PurePosixPath(name)
    if path is None or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise UserError(
            f"{field}: {source} names {str(name)[:200]!r}, which is outside its folder, needs files in "
            f"{source.parent}; take another folder, or mend the names"
        )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Refuse a checkpoint's file that is missing or cannot be read; other system errors may pass, and are raised."""
    try:
        yield
    except OSError as error:
        if error.errno not in PERMANENT:
            raise
        raise UserError(f"load: {path} cannot be read ({error.strerror}); take another checkpoint") from None


def facts_of(path: Path) -> FileFacts:
    """Read a file completely and return its size and checksum."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(functools.partial(file.read, 2**20), b""):
            heartbeat.beat()
            digest.update(block)
        return FileFacts(file.tell(), digest.hexdigest())


@functools.cache
def code_identity() -> dict[str, str]:
    """Return the versions of Python and the main packages, and one SHA-256 of this package's sources."""
    root = Path(megatron_ext.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}:{path.stat().st_size}:".encode() + path.read_bytes())
    versions = {"python": platform.python_version(), "sources": digest.hexdigest()}
    packages = ("megatron_ext", "megatron-core", "torch")
    return versions | {package: installed_version(package) or "not installed" for package in packages}


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
