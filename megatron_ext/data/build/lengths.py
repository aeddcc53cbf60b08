"""Count documents and tokens by bins of length, powers of two, as in ProLong's Table 14."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_ext.arrays import Int64

EDGES = np.concatenate([[0], 1 << np.arange(10, 20)])  # 0, 1K, 2K ... 512K tokens
NAMES = ["below 1K", *(f"{1 << k}K to {2 << k}K" for k in range(9)), "512K and more"]


def length_table(lengths: Int64) -> list[dict[str, Any]]:
    """Return a row for each bin, from the tokens of each document; shares are of all documents or tokens."""
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


def describe_lengths(table: list[dict[str, Any]]) -> str:
    """Return the table as lines for a terminal."""
    lines = [f"{'tokens':>14} {'documents':>14} {'share':>7} {'tokens':>18} {'share':>7}"]
    for row in table:
        lines.append(
            f"{row['length']:>14} {row['documents']:>14,} {row['share_of_documents']:>7.1%} "
            f"{row['tokens']:>18,} {row['share_of_tokens']:>7.1%}"
        )
    return "\n".join(lines)
