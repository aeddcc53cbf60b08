"""Random numbers of rows: by the run's seed and the sample index, whatever the layout."""

from __future__ import annotations

import hashlib


def row_seed(seed: int, sample: int) -> int:
    """Derive a seed of its own for each row, 0 .. 2^64-1."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}:row".encode()).digest()[:8], "big")


def draw(seed: int, sample: int) -> float:
    """Draw a number in [0, 1), for the choice of the rows that are scored."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}:scored".encode()).digest()[:6], "big") / 2**48
