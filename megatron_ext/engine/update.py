"""Clip the gradients and update the weights without a device-to-host copy.

`MegatronOptimizer.step` reads the gradient norm on the host to decide whether to clip, so the host waits for the whole
backward pass and the device then waits for the host. Here the norm stays on the device, with each rank's part summed in
float64; gradients are multiplied by min(1, limit / (norm + 1e-6)), which is exact where it is 1. Everything else uses
Megatron's public methods. `log_num_zeros_in_grad` and fp16's loss scale, which would read from the device, are options
of Megatron that this package does not set.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor


@torch.no_grad()
def update(
    optimizer: MegatronOptimizer, device: torch.device, accepts: Callable[[Tensor], bool] | None = None
) -> tuple[Tensor, bool]:
    """Clip the gradients to the optimizer's limit and update the weights.

    Args:
        optimizer: gradients are in their buffers.
        device: of the result.
        accepts: returns, given the squared norm, whether the weights may change; it must return the same on all ranks.

    Returns:
        float32 [] on `device`, the squared norm of all gradients on all ranks before clipping; and whether the weights
        were changed. If not, the optimizer's state is unchanged too, and the gradients are not clipped.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    # The ranks over which gradients are distributed. Under expert parallelism the experts have their own optimizer and,
    # if it is not a distributed one, another group: the one in which each expert occurs once.
    by_group: dict[dist.ProcessGroup, list[MegatronOptimizer]] = {}
    for part in parts:
        by_group.setdefault(part.get_grad_stats_parallel_group(), []).append(part)
    optimizer.prepare_grads()
    squared = torch.zeros((), device=device)
    for group, members in by_group.items():
        counted = [grad for part in members for grad in part.get_main_grads_for_grad_norm()]
        share: Tensor = torch.zeros((), device=device)
        if counted:
            # in float64: torch's `get_total_norm` rounds to the gradients' dtype, and on a CPU it sums ten million
            # squares sequentially, which makes the norm 4e-4 too small in float32
            norms = [norm.to(device) for norm in torch._foreach_norm(counted, 2.0, torch.float64)]
            share = (torch.linalg.vector_norm(torch.stack(norms)) ** 2.0).float()
        dist.all_reduce(share, group=group)
        squared += share
    if accepts is not None and not accepts(squared):
        return squared, False
    limit = optimizer.config.clip_grad
    if math.isfinite(limit):
        factor = (limit / (squared.double().sqrt() + 1e-6)).clamp(max=1.0).float()
        # the gradients that the update reads, as in `clip_grad_by_total_norm_fp32`
        name = "decoupled_grad" if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        found = (getattr(param, name, None) for part in parts for param in part.get_parameters())
        grads = [grad for grad in found if grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
    optimizer.step_with_ready_grads()
    return squared, True
