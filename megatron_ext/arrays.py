"""Type aliases of numpy arrays by dtype, and operations on arrays of half-open integer intervals.

Shapes are in the docstrings (letters: docs/glossary.md).
"""

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def ranges(starts: Int64, lengths: Int64) -> Int64:
    """Return the integers of [start, start + length) for each interval, concatenated; int64 [sum of lengths].

    ranges([5, 0], [2, 3]) = [5, 6, 0, 1, 2]
    """
    before = np.cumsum(lengths) - lengths
    listed: Int64 = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
    return listed


def overlaps(low: Int64, high: Int64, starts: Int64, ends: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Find the parts that intervals [low, high) share with disjoint intervals [start, end) sorted by position.

    Returns:
        (query, interval, from, to), int64 each: the part [from, to) of the query lies in that interval. Ordered by
        query, then by position; empty parts are left out.
    """
    first = np.searchsorted(ends, low, side="right")
    counts = np.maximum(np.searchsorted(starts, high, side="left") - first, 0)
    query = np.repeat(np.arange(len(low), dtype=np.int64), counts)
    interval = ranges(first.astype(np.int64), counts)
    return query, interval, np.maximum(low[query], starts[interval]), np.minimum(high[query], ends[interval])
