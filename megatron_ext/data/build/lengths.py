"""Statistics of document lengths.

These are the documents and tokens in bins of powers of two, as in ProLong's Table 14, and the moments and quartiles of
SkyLadder's Table 26.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_ext.arrays import Int64

EDGES = np.concatenate([[0], 1 << np.arange(10, 20)])  # 0, 1K, 2K ... 512K tokens
NAMES = ["below 1K", *(f"{1 << k}K to {2 << k}K" for k in range(9)), "512K and more"]


def length_table(lengths: Int64) -> list[dict[str, Any]]:
    """Count documents and their tokens by bins of length.

    `lengths` are the tokens of each document, [documents]; shares are fractions of all documents or tokens.
    """
    bins = np.searchsorted(EDGES, lengths, side="right") - 1
    documents = np.bincount(bins, minlength=len(EDGES))
    tokens = np.bincount(bins, weights=lengths, minlength=len(EDGES)).astype(np.int64)
    return [
        {
            "length": name,
            "documents": int(d),
            "share_of_documents": round(float(d / max(documents.sum(), 1)), 6),
            "tokens": int(t),
            "share_of_tokens": round(float(t / max(tokens.sum(), 1)), 6),
        }
        for name, d, t in zip(NAMES, documents, tokens, strict=True)
    ]


def length_statistics(lengths: Int64) -> dict[str, float | None]:
    """Return mean, standard deviation, quartiles, skewness and kurtosis of lengths [documents].

    Skewness is m3 / m2^1.5 of the central moments, kurtosis is m4 / m2^2 - 3, which is 0 for a normal distribution;
    both are None if all lengths are equal.
    """
    mean = float(lengths.mean(dtype=np.float64))
    m2, m3, m4 = (float(((lengths - mean) ** power).mean()) for power in (2, 3, 4))
    names = ("min", "p25", "median", "p75", "max")
    quartiles = dict(zip(names, np.percentile(lengths, (0, 25, 50, 75, 100)).tolist(), strict=True))
    shape = {"skewness": m3 / m2**1.5 if m2 else None, "kurtosis": m4 / m2**2 - 3 if m2 else None}
    return {"mean": mean, "std": m2**0.5, **quartiles, **shape}


def describe_lengths(table: list[dict[str, Any]], statistics: dict[str, float | None]) -> str:
    """Return both as lines for a terminal."""
    lines = [f"{'tokens':>14} {'documents':>14} {'share':>7} {'tokens':>18} {'share':>7}"]
    for row in table:
        lines.append(
            f"{row['length']:>14} {row['documents']:>14,} {row['share_of_documents']:>7.1%} "
            f"{row['tokens']:>18,} {row['share_of_tokens']:>7.1%}"
        )
    documents, tokens = (sum(row[name] for row in table) for name in ("documents", "tokens"))
    lines.append(f"{'all':>14} {documents:>14,} {'':>7} {tokens:>18,}")
    digits = {"skewness": 1, "kurtosis": 1}
    known = {name: value for name, value in statistics.items() if value is not None}
    lines.append(", ".join(f"{name} {value:,.{digits.get(name, 0)}f}" for name, value in known.items()))
    return "\n".join(lines)
