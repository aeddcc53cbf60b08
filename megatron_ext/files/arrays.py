"""Write .npy files."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megatron_ext.files.atomic import write_whole


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a .npy file. numpy's own writing to a file hides the reason of a failure, such as a full disk."""
    with path.open("wb", buffering=0) as file:
        np.save(SimpleNamespace(write=partial(write_whole, file)), array)
