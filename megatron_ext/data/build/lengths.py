"""How long documents are: documents and tokens by bins of powers of two, as in ProLong's Table 26."""

from __future__ import annotations

from typing import Any

import numpy as np

EDGES = np.concatenate([[0], 1 << np.arange(10, 20)])  # 0, 1K, 2K ... 512K tokens
NAMES = ["below 1K", *(f"{1 << k}K to {2 << k}K" for k in range(9)), "512K and more"]


class LengthTable:
    """Counts documents by their tokens, the end-of-document token included.

    Attributes:
        documents, tokens: int64 [11], of the documents with EDGES[i] <= tokens < EDGES[i + 1].
    """

    def __init__(self) -> None:
        self.documents = np.zeros(len(EDGES), np.int64)
        self.tokens = np.zeros(len(EDGES), np.int64)

    @classmethod
    def of_card(cls, rows: list[dict[str, Any]]) -> LengthTable:
        """Read the table from the rows that `card` made of it."""
        table = cls()
        table.documents[:] = [row["documents"] for row in rows]
        table.tokens[:] = [row["tokens"] for row in rows]
        return table

    def add(self, lengths: np.ndarray) -> None:
        """Count documents of these tokens [documents]."""
        bins = np.searchsorted(EDGES, lengths, side="right") - 1
        np.add.at(self.documents, bins, 1)
        np.add.at(self.tokens, bins, lengths)

    def card(self) -> list[dict[str, object]]:
        """Write the table for a JSON file; a share is of all documents or tokens."""
        documents, tokens = max(self.documents.sum(), 1), max(self.tokens.sum(), 1)
        return [
            {
                "length": name,
                "documents": int(d),
                "share_of_documents": round(float(d / documents), 6),
                "tokens": int(t),
                "share_of_tokens": round(float(t / tokens), 6),
            }
            for name, d, t in zip(NAMES, self.documents, self.tokens, strict=True)
        ]

    def __str__(self) -> str:
        """Write the table for a terminal."""
        lines = [f"{'tokens':>14} {'documents':>14} {'share':>7} {'tokens':>18} {'share':>7}"]
        for row in self.card():
            lines.append(
                f"{row['length']:>14} {row['documents']:>14,} {row['share_of_documents']:>7.1%} "
                f"{row['tokens']:>18,} {row['share_of_tokens']:>7.1%}"
            )
        lines.append(f"{'all':>14} {self.documents.sum():>14,} {'':>7} {self.tokens.sum():>18,}")
        return "\n".join(lines)
