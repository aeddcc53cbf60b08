"""A test's own process as the only rank, and as it was before when the test is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ext.engine import parallel, platform


@contextmanager
def one_process() -> Iterator[None]:
    """End the process groups that begin here, and take back what `platform.choose` changes, the environment too."""
    before = dict(os.environ)
    try:
        yield
    finally:
        parallel.stop()
        platform.uninstall_cpu()
        os.environ.clear()
        os.environ.update(before)
