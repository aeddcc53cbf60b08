"""How tensors of the host get to the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, without waiting for the copy.

    A CUDA copy from pageable memory makes the host wait for all that the device has been given before; one from
    pinned memory does not. On a CPU the tensor itself is returned.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
