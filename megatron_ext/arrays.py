"""Type aliases of numpy arrays by dtype, integers of intervals, and .npy files.

Shapes are in the docstrings (letters: docs/glossary.md).
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from megatron_ext.files.atomic import write_whole

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


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file. numpy's own writing to a file hides the reason of a failure, such as a full disk."""
    with path.open("wb", buffering=0) as file:
        np.save(SimpleNamespace(write=partial(write_whole, file)), array)
