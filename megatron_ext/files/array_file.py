"""Open .npy files that may be damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import first_line


def open_array(path: Path) -> npt.NDArray[Any]:
    """Open the array in a file, memory-mapped; arrays of Python objects are refused.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a complete array.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python literals
        raise ValueError(first_line(error)) from None
