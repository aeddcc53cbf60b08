"""Compute checksums of files and strings, and format them for messages."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_ext.errors import echo


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


def short_hash(value: object) -> str:
    """Shorten a fingerprint to its first digits, and other values to a line, for a message."""
    if isinstance(value, str):
        return f"{value[:12]}..." if len(value) == 64 else value[:200]
    return echo(value)
