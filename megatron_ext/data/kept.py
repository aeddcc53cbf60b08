"""Keep arrays that are expensive to compute: one process computes and writes them, all processes map the files.

    FOLDER/5f0c1a77d2e9b3a4/
        about.json         what the arrays were computed from, their shapes and dtypes
        NAME.npy           an array
    FOLDER/5f0c1a77d2e9b3a4.lock

Arrays that are incomplete, or of another shape than about.json says, are computed again. A folder may be removed while
no process reads it.
"""

import hashlib
import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.files.arrays import save_array
from megatron_ext.files.atomic import atomic_folder
from megatron_ext.files.lock import try_lock
from megatron_ext.launch import is_first

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]
Key = Mapping[str, object]  # all inputs of the arrays, as JSON has them
LARGE = 2**18  # elements of an array: fewer are faster computed by each process than kept
_ABOUT = "about.json"


def kept_arrays(parent: Path, key: Key, compute: Callable[[], Arrays]) -> Arrays:
    """Map the arrays of `key`, kept in `parent`; the first process that misses them computes and writes them.

    The others wait for it. Where files cannot be written, locked or mapped, each process computes its own.
    """
    wait_s = 0.2
    try:
        while True:
            was_computed = compute_ahead(parent, key, compute)
            arrays = _read(parent, key)
            if arrays is not None:
                return arrays
            if was_computed:
                raise OSError("what was just written cannot be read")
            time.sleep(wait_s * random.uniform(0.5, 1.0))  # thousands of processes may wait
            wait_s = min(1.5 * wait_s, 5.0)
    except OSError as error:
        if is_first():
            logger.warning("warning: %s cannot be used (%s): each process keeps its own copy", parent, error)
        return compute()


def compute_ahead(parent: Path, key: Key, compute: Callable[[], Arrays]) -> bool:
    """Compute and write the arrays of `key`, unless they are there; return False if another process does it now.

    Raises:
        OSError: `parent` cannot be written or locked.
    """
    if _read(parent, key) is not None:
        return True
    parent.mkdir(parents=True, exist_ok=True)
    with try_lock(_folder(parent, key).with_suffix(".lock")) as locked:
        if locked and _read(parent, key) is None:
            _write(parent, key, compute())
    return locked


def _folder(parent: Path, key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return parent / digest[:16]


def _write(parent: Path, key: Key, arrays: Arrays) -> None:
    folder = _folder(parent, key)
    for abandoned in parent.glob(f"{folder.name}.*.partial"):  # by a killed process: this one has the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    if _read(parent, key) is None:
        shutil.rmtree(folder, ignore_errors=True)  # damaged arrays
    with atomic_folder(folder, replace=False) as partial:
        for name, array in arrays.items():
            save_array(partial / f"{name}.npy", array)
        about = {"key": dict(key), "arrays": _shapes(arrays)}
        (partial / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _read(parent: Path, key: Key) -> Arrays | None:
    """Map the arrays of `key`; None if there are none, or if they are damaged. Other errors may be transient."""
    folder = _folder(parent, key)
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in about["arrays"]}
        if about == {"key": dict(key), "arrays": _shapes(arrays)}:
            return arrays
    except (FileNotFoundError, EOFError, ValueError, KeyError, TypeError):  # numpy and json raise ValueError
        return None
    return None


def _shapes(arrays: Arrays) -> dict[str, Any]:
    return {name: [array.dtype.str, *array.shape] for name, array in arrays.items()}
