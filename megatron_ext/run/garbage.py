"""What Python's collector of circular references looks at while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Leave out what is there already: libraries, model and optimizer, half a million objects that stay.

    The collector looks at the old objects only once those that have become old since make up a quarter of them. What a
    checkpoint leaves behind is circular and some hundred objects: rank 0 would pile up thousands of steps' worth, tens
    of MiB. Leaving out what is there makes that quarter small, and a collection take milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts the old objects anew: none
    try:
        yield
    finally:
        gc.unfreeze()
