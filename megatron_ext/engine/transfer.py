"""Copy between host and device without blocking either.

On CUDA a copy from or to pageable memory makes the host wait until the device has done all that it was given before.
So what goes to the device is pinned first, and what comes from it goes to pinned memory and is read once it is there.
On a CPU nothing is copied: what is read is there already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.device import moved


def to_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Put numbers of the host on the device; float64 [len(values)]."""
    return moved(torch.tensor(values, dtype=torch.float64), device)


class AsyncHostCopy:
    """Copies a device tensor to the host asynchronously; `values` waits for this copy alone.

    Args:
        values: 1-dimensional.
    """

    def __init__(self, values: Tensor) -> None:
        self._landed: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._host = values
            return
        self._host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        self._landed = torch.cuda.Event()
        self._landed.record()

    def values(self) -> list[float]:
        """Return the numbers, once they are there."""
        if self._landed is not None:
            self._landed.synchronize()
        values: list[float] = self._host.tolist()
        return values
