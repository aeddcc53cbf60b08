"""Compute one checksum of files and strings."""

import hashlib
from pathlib import Path

from megatron_ext.errors import UserError

_EDGE = 2**20  # bytes


def fingerprint(*parts: str | bytes | Path) -> str:
    """Return the hexadecimal SHA-256 of the parts, in order; a Path contributes its file's content."""
    digest = hashlib.sha256()
    for part in parts:
        # the length precedes the content: ("ab", "c") differs from ("a", "bc")
        if isinstance(part, Path):
            digest.update(f"file:{part.stat().st_size}:".encode())
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        else:
            content = part.encode() if isinstance(part, str) else part
            digest.update(f"{type(part).__name__}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def file_edges(name: str) -> list[str | bytes]:
    """Return a file's size and the MiB at each of its ends, to identify a file that is too large to read."""
    try:
        with Path(name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(_EDGE)
            file.seek(max(size - _EDGE, 0))
            return [str(size), head, file.read()]
    except FileNotFoundError as error:  # other errors may be transient
        raise UserError(f"data: {name} cannot be read ({error.strerror}); check the path") from None
