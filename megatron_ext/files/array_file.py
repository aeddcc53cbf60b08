"""Opens .npy files that may be damaged."""

from __future__ import annotations

import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import first_line

# of numpy, which parses a header as Python's literals
_DAMAGED = (ValueError, EOFError, SyntaxError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def open_array(path: Path) -> npt.NDArray[Any]:
    """Open the array in a file, memory-mapped; one of Python objects is refused.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no whole array.
    """
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (*_DAMAGED, tokenize.TokenError, MemoryError) as error:
        raise ValueError(first_line(error)) from None
    if not isinstance(array, np.ndarray):  # a .npz under this name
        raise ValueError("it is an archive of arrays")
    return array
