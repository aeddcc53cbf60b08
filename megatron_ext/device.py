"""Copy host tensors to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device` without blocking the host.

    A copy from pageable memory to CUDA makes the host wait for all queued work on the device; a copy from pinned
    memory does not. On a CPU the tensor itself is returned.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
