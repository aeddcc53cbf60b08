"""Copy between host and device without blocking either.

On CUDA, a copy from or to pageable memory makes the host wait for all earlier work of the device. So data for the
device is pinned first, and data from the device is copied to pinned memory and read once the copy is complete. On a CPU
nothing is copied.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Carrier = TypeVar("Carrier")


def moved(carrier: Carrier, device: torch.device) -> Carrier:
    """Copy a tensor, or the tensors in a tuple or dataclass, to `device` without blocking the host.

    A carrier that is on the device already is returned itself.
    """
    result: Any = carrier
    if isinstance(result, Tensor):
        if device.type == "cuda" and result.device.type == "cpu":
            result = result.pin_memory()
        result = result.to(device, non_blocking=True)
    elif type(result) is tuple:
        on_device = tuple(moved(value, device) for value in result)
        if any(new is not old for new, old in zip(on_device, result, strict=True)):
            result = on_device
    elif is_dataclass(result):
        values = {field.name: getattr(result, field.name) for field in fields(result) if field.init}
        copies = {name: moved(value, device) for name, value in values.items()}
        changed: Any = {name: copy for name, copy in copies.items() if copy is not values[name]}
        if changed:
            result = replace(result, **changed)  # type: ignore[type-var]
    typed: Carrier = result
    return typed


def to_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers to the device; float64 [len(values)]."""
    return moved(torch.tensor(values, dtype=torch.float64), device)


class AsyncHostCopy:
    """Copies device tensors to the host in one asynchronous copy, as float64; `values` waits only for this copy."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self._landed: torch.cuda.Event | None = None
        self._host = joined = torch.cat([tensor.double().flatten() for tensor in tensors.values()])
        if joined.device.type == "cuda":
            self._host = torch.empty_like(joined, device="cpu", pin_memory=True).copy_(joined, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record()

    def values(self) -> dict[str, list[float]]:
        """Return the numbers of each tensor by its name."""
        if self._landed is not None:
            self._landed.synchronize()
        numbers = iter(self._host.tolist())
        return {name: list(itertools.islice(numbers, size)) for name, size in self._sizes.items()}
