"""Compute one checksum of files and strings."""

import hashlib
from pathlib import Path


def fingerprint(*parts: str | bytes | Path) -> str:
    """Return the hexadecimal SHA-256 of the parts, in order; a Path contributes its file's content."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                size, content = part.stat().st_size, hashlib.file_digest(file, "sha256").digest()
            label = "file"
        else:
            content = part.encode() if isinstance(part, str) else part
            label, size = type(part).__name__, len(content)
        # the length precedes the content: ("ab", "c") differs from ("a", "bc")
        digest.update(f"{label}:{size}:".encode() + content)
    return digest.hexdigest()
