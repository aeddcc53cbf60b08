"""What building a layout costs: python benchmarks/layout.py

A row of 512K tokens whose documents are log-normal like FineWeb-Pro's, at several windows; the best of many
runs on one core, beside the goal of 1 ms at about 17,000 segments.
"""

from __future__ import annotations

import json
import time

import numpy as np

from megatron_ext.layout import build_layout

ROW = 512 * 1024
REPEATS = 50


def document_ends(row_length: int, seed: int) -> np.ndarray:
    """Draw the exclusive ends of documents with median 849 and mean 1,364 tokens (arXiv 2503.15450, Table 26)."""
    lengths = np.random.default_rng(seed).lognormal(np.log(849), 0.974, size=row_length // 200)
    ends = np.cumsum(np.maximum(lengths.astype(np.int64), 1))
    return ends[ends < row_length]


def main() -> None:
    """Print one JSON object per window."""
    ends = document_ends(ROW, seed=0)
    for window in (1, 8, 32, 1024, 32768, ROW):
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            layout = build_layout(ROW, ends, window)
            times.append(time.perf_counter() - began)
        print(json.dumps({"window": window, "segments": layout.segments, "milliseconds": round(min(times) * 1e3, 3)}))


if __name__ == "__main__":
    main()
