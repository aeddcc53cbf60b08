"""How long documents are: documents and tokens by bins of powers of two, as in ProLong's Table 26, and the moments and
quartiles of SkyLadder's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

EDGES = np.concatenate([[0], 1 << np.arange(10, 20)])  # 0, 1K, 2K ... 512K tokens
NAMES = ["below 1K", *(f"{1 << k}K to {2 << k}K" for k in range(9)), "512K and more"]
Statistics = dict[str, float | None]


def statistics(counts: Counter[int]) -> Statistics:
    """Describe the lengths of documents, in tokens, by how many documents have each length.

    Returns:
        mean, std (divided by the number), min, p25, median, p75 (interpolated), max, skewness (m3 / m2^1.5 of the
        central moments), kurtosis (m4 / m2^2 - 3: 0 for a normal distribution); the last two are None where all
        lengths are the same.
    """
    values = np.array(sorted(counts), dtype=np.float64)
    documents = np.array([counts[int(value)] for value in values], dtype=np.float64)
    total = documents.sum()
    mean = float((values * documents).sum() / total)
    m2, m3, m4 = (float(((values - mean) ** power * documents).sum() / total) for power in (2, 3, 4))
    up_to = np.cumsum(documents)  # documents of at most this length

    def percentile(share: float) -> float:
        place = share * (total - 1)
        below, above = (float(values[np.searchsorted(up_to, at, "right")]) for at in (np.floor(place), np.ceil(place)))
        return below + (above - below) * (place - np.floor(place))

    quartiles = {"p25": percentile(0.25), "median": percentile(0.5), "p75": percentile(0.75)}
    return {
        "mean": mean,
        "std": m2**0.5,
        "min": int(values[0]),
        **quartiles,
        "max": int(values[-1]),
        "skewness": m3 / m2**1.5 if m2 else None,
        "kurtosis": m4 / m2**2 - 3 if m2 else None,
    }


class LengthTable:
    """Counts documents by their tokens, the end-of-document token included.

    Attributes:
        documents, tokens: int64 [11], of the documents with EDGES[i] <= tokens < EDGES[i + 1].
    """

    def __init__(self) -> None:
        self.documents = np.zeros(len(EDGES), np.int64)
        self.tokens = np.zeros(len(EDGES), np.int64)
        self._counts: Counter[int] = Counter()  # documents of each length: as many entries as lengths differ
        self._statistics: Statistics | None = None

    @classmethod
    def of_card(cls, rows: list[dict[str, Any]], about: Statistics | None = None) -> LengthTable:
        """Read the table from what `card` and `statistics_card` made of it."""
        table = cls()
        table._statistics = about
        table.documents[:] = [row["documents"] for row in rows]
        table.tokens[:] = [row["tokens"] for row in rows]
        return table

    def add(self, lengths: np.ndarray) -> None:
        """Count documents of these tokens [documents]."""
        bins = np.searchsorted(EDGES, lengths, side="right") - 1
        np.add.at(self.documents, bins, 1)
        np.add.at(self.tokens, bins, lengths)
        values, counts = np.unique(lengths, return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def statistics_card(self) -> Statistics | None:
        """Return the statistics for a JSON file; None where there is no document."""
        return statistics(self._counts) if self._counts else self._statistics

    def card(self) -> list[dict[str, object]]:
        """Return the table for a JSON file; a share is of all documents or tokens."""
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
        """Return the table for a terminal."""
        lines = [f"{'tokens':>14} {'documents':>14} {'share':>7} {'tokens':>18} {'share':>7}"]
        for row in self.card():
            lines.append(
                f"{row['length']:>14} {row['documents']:>14,} {row['share_of_documents']:>7.1%} "
                f"{row['tokens']:>18,} {row['share_of_tokens']:>7.1%}"
            )
        lines.append(f"{'all':>14} {self.documents.sum():>14,} {'':>7} {self.tokens.sum():>18,}")
        about = {name: value for name, value in (self.statistics_card() or {}).items() if value is not None}
        small = {name: f"{value:,.1f}" for name, value in about.items() if name in ("skewness", "kurtosis")}
        lines.append(", ".join(f"{name} {small.get(name, f'{value:,.0f}')}" for name, value in about.items()))
        return "\n".join(lines)
