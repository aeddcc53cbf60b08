"""Write and check the manifest of a checkpoint folder.

    iter_0000040/manifest.json   {"sha256": of all the rest, "format": 2, "step": 40, ..., "files": {name: ...}}

The manifest is written last, before the folder is renamed to its final name. It lists every other file with its size
and SHA-256 and contains its own checksum, so that a corrupted file, including this one, is detected and named.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

import megatron_ext
from megatron_ext import heartbeat
from megatron_ext.errors import PERMANENT, UserError, echo, installed_version
from megatron_ext.files.atomic import sync

MANIFEST = "manifest.json"
FORMAT = 2


@dataclass(frozen=True)
class FileFacts:
    """The size of a file in bytes, and its SHA-256 in hexadecimal."""

    size: NonNegativeInt
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint except tensors.

    Attributes:
        step, consumed_samples: completed optimizer steps and the rows that they consumed.
        layout: sizes of the process grid that wrote it (tensor, pipeline, context, data, device).
        config: the run's configuration, section by section.
        optimizer: the optimizer's counters; empty in a checkpoint of weights only.
        trainer_state: the state of the trainer's callbacks, such as the losses used to detect spikes.
        data: fingerprints of the data sets, in order.
        code: versions of the software that wrote it, and the SHA-256 of this package's sources.
        files: every other file of the folder.
        seconds: duration of writing.
    """

    step: NonNegativeInt
    consumed_samples: NonNegativeInt
    layout: dict[str, Any]
    config: dict[str, dict[str, Any]]
    optimizer: dict[str, Any]
    code: dict[str, str]
    files: dict[str, FileFacts]
    seconds: float
    data: tuple[str, ...] = ()
    trainer_state: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """The total size of all files."""
        return sum(facts.size for facts in self.files.values())

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
    def read(cls, folder: Path) -> Manifest:
        """Read and check manifest.json itself; the other files are not checked.

        Raises:
            UserError: it is missing, damaged, of another format, or names files outside the folder.
        """
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            if is_transient(error):
                raise
            raise UserError(
                f"load: {path} cannot be read ({error.strerror}); {folder} is no complete checkpoint"
            ) from None
        except ValueError:
            raise UserError(f"load: {path} is damaged: it is no JSON; take another checkpoint") from None
        if not isinstance(values, dict) or values.pop("sha256", None) != _digest(values):
            raise UserError(f"load: {path} is damaged: its own checksum differs; take another checkpoint")
        if values.get("format") != FORMAT:
            given = echo(values.get("format"))
            raise UserError(f"load: {path} has format {given}, this version reads {FORMAT}; use its version")
        known = {field.name for field in fields(cls)}  # a later version may have added other fields
        values = {name: value for name, value in values.items() if name in known}
        try:
            manifest = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            wrong = error.errors()[0]
            name = ".".join(map(str, wrong["loc"]))
            raise UserError(f"load: {path} is damaged: {name}: {wrong['msg']}; take another checkpoint") from None
        for name in manifest.files:
            check_inside(name, path, "load")
        return manifest

    def check_optimizer(self, folder: Path, remedy: str) -> None:
        """Check that a checkpoint has an optimizer state; those of tools/convert_checkpoint.py do not.

        Args:
            folder: the checkpoint folder.
            remedy: how to use such a checkpoint, for the message.

        Raises:
            UserError: it has no optimizer state.
        """
        if not self.optimizer:
            raise UserError(f"load: {folder} holds weights alone, needs an optimizer's state; {remedy}")

    def check_files(self, folder: Path, names: Iterable[str], *, content: bool) -> None:
        """Compare the sizes of some of the files and, with `content`, their checksums.

        Raises:
            UserError: one is missing, cannot be read or differs; the message names it.
            OSError: the file system failed; another attempt may succeed.
        """
        for name in names:
            path, wanted = folder / name, self.files[name]
            if not path.is_file():
                raise UserError(f"load: {path} is missing; take another checkpoint")
            size = path.stat().st_size
            if size != wanted.size:
                raise UserError(f"load: {path} is damaged: {size:,} bytes of {wanted.size:,}; take another checkpoint")
            if content:
                try:
                    checksum = facts_of(path).sha256
                except OSError as error:
                    if is_transient(error):
                        raise
                    raise UserError(f"load: {path} cannot be read ({error.strerror}); take another one") from None
                if checksum != wanted.sha256:
                    raise UserError(f"load: {path} is damaged: its checksum differs; take another checkpoint")


def check_inside(name: Any, source: Path, field: str) -> str:
    """Return `name`, a relative path read from the file `source`, after checking that it stays inside its folder.

    Only the name is checked: the file may be a link created by the owner of the folder.

    Args:
        name: the name as it was read.
        source: the file that it was read from.
        field: the first word of the error message.

    Raises:
        UserError: it is absolute, contains "..", or is not a file name.
    """
    path = PurePosixPath(name) if isinstance(name, str) else None
    if path is None or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise UserError(
            f"{field}: {source} names {str(name)[:200]!r}, which is outside its folder, needs files in "
            f"{source.parent}; take another folder, or mend the names"
        )
    return str(name)


def is_transient(error: Exception) -> bool:
    """Return whether an error is due to the machine rather than to content or user, so that a retry may succeed."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno is not None and error.errno not in PERMANENT
    )


def facts_of(path: Path) -> FileFacts:
    """Read a file completely and return its size and checksum."""
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            heartbeat.beat()
            digest.update(block)
            size += len(block)
    return FileFacts(size, digest.hexdigest())


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
