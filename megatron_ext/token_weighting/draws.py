"""Random numbers for rows, which depend only on the run's seed and the sample index."""

from __future__ import annotations

import hashlib


def row_seed(seed: int, sample: int) -> int:
    """Return a seed for the row of a sample, 0 .. 2^64-1."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}:row".encode()).digest()[:8], "big")


def draw(seed: int, sample: int) -> float:
    """Return a random number in [0, 1) that decides whether the row is scored."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}:scored".encode()).digest()[:6], "big") / 2**48
