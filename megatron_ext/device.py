"""Copy between host and device without blocking either.

On CUDA, a copy from or to pageable memory makes the host wait for all earlier work of the device. So data for the
device is pinned first, and data from the device is copied to pinned memory and read once the copy is complete. On a CPU
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Carrier = TypeVar("Carrier")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device` without blocking the host; on a CPU, return the tensor itself."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def tensors_moved(carrier: Carrier, device: torch.device) -> Carrier:
    """Return a dataclass with its tensors on `device`; nested dataclasses are not moved."""
    tensors = {name: value for name, value in vars(carrier).items() if isinstance(value, Tensor)}
    on_device: Any = {name: moved(tensor, device) for name, tensor in tensors.items()}
    return replace(carrier, **on_device)  # type: ignore[type-var]


def to_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers to the device; float64 [len(values)]."""
    return moved(torch.tensor(values, dtype=torch.float64), device)


class AsyncHostCopy:
    """Copies a 1-dimensional device tensor to the host asynchronously; `values` waits only for this copy."""

    def __init__(self, values: Tensor) -> None:
        self._landed: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._host = values
            return
        self._host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        self._landed = torch.cuda.Event()
        self._landed.record()

    def values(self) -> list[float]:
        """Return the numbers, after waiting for the copy."""
        if self._landed is not None:
            self._landed.synchronize()
        values: list[float] = self._host.tolist()
        return values
