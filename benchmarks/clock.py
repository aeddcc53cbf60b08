"""The device of a benchmark, and its clock."""

import contextlib
import time
from collections.abc import Iterator

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@contextlib.contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the time of the block: by CUDA's events, or processor time, which excludes other processes."""
    if not CUDA:
        began = time.process_time()
        yield
        seconds.append(time.process_time() - began)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    yield
    end.record()
    end.synchronize()
    seconds.append(start.elapsed_time(end) / 1e3)
