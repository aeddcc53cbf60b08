"""Clip the gradients and update the weights without a device-to-host copy.

`MegatronOptimizer.step` reads the norm of the gradients on the host to decide whether to clip them, so that the host
waits for the whole backward pass while the device waits for the host. Here the norm stays on the device, each
rank's share added up in float64; gradients are multiplied by min(1, limit / (norm + 1e-6)), exact where that is 1.

What comes before and after are Megatron's own public parts. `log_num_zeros_in_grad` and fp16's loss scale, which
would read the device, are options of Megatron that this package does not set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor


@torch.no_grad()
def update(
    optimizer: MegatronOptimizer, device: torch.device, accepts: Callable[[Tensor], bool] | None = None
) -> tuple[Tensor, bool]:
    """Clip the gradients to the optimizer's limit and change the weights.

    Args:
        optimizer: over the gradients in their buffers.
        device: that computes.
        accepts: tells by the squared norm whether the weights may change, alike on all ranks; None: they may.

    Returns:
        float32 [] on `device`: the square of the norm before clipping, of all gradients on all ranks; and whether the
        weights were changed. If not, neither was the optimizer's state, and the gradients are not clipped.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    optimizer.prepare_grads()
    squared = torch.zeros((), device=device)
    for group, members in _by_group(parts):
        counted = [grad for part in members for grad in part.get_main_grads_for_grad_norm()]
        share: Tensor = torch.zeros((), device=device)
        if counted:
            # in float64: torch's `get_total_norm` rounds to the gradients' type, and on a CPU it adds ten million
            # squares one after another, 4e-4 of the norm too few in float32
            norms = [norm.to(device) for norm in torch._foreach_norm(counted, 2.0, torch.float64)]
            share = (torch.linalg.vector_norm(torch.stack(norms)) ** 2.0).float()
        dist.all_reduce(share, group=group)
        squared += share
    if accepts is not None and not accepts(squared):
        return squared, False
    limit = optimizer.config.clip_grad
    if math.isfinite(limit):
        factor = (limit / (squared.double().sqrt() + 1e-6)).clamp(max=1.0).float()
        grads = [grad for part in parts for grad in _gradients(part)]
        if grads:
            torch._foreach_mul_(grads, factor)
    optimizer.step_with_ready_grads()
    return squared, True


def _by_group(parts: Sequence[MegatronOptimizer]) -> list[tuple[dist.ProcessGroup, list[MegatronOptimizer]]]:
    """Sort the parts by the ranks over which each one's gradients are different ones.

    Under expert parallelism the experts have an optimizer of their own, and without a distributed one another group:
    that in which each expert is once.
    """
    sorted_parts: list[tuple[dist.ProcessGroup, list[MegatronOptimizer]]] = []
    for part in parts:
        group = part.get_grad_stats_parallel_group()
        members = next((members for known, members in sorted_parts if known is group), None)
        if members is None:
            sorted_parts.append((group, [part]))
        else:
            members.append(part)
    return sorted_parts


def _gradients(part: MegatronOptimizer) -> list[Tensor]:
    """List the gradients that the update reads, as `clip_grad_by_total_norm_fp32` finds them."""
    name = "decoupled_grad" if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
    found = (getattr(param, name, None) for param in part.get_parameters())
    return [grad for grad in found if grad is not None]
