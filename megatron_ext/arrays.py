"""Type aliases of numpy arrays by dtype, and `ranges`, which lists the integers of intervals.

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
