"""The norms of a step's gradients, part of the model by part: what tells which layer a spike came from."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_ext.engine.optimizer import unwrap
from megatron_ext.engine.parallel import Ranks


def gradient_norms(model: Sequence[DistributedDataParallel], ranks: Ranks) -> dict[str, float]:
    """Compute the norm of the gradients in the buffers for each part of the model; all processes call it and get all.

    The squares add up to that of the whole norm before clipping. The buffers hold whole gradients: the run has no
    distributed optimizer.
    """
    squares: dict[str, float] = {}
    for chunk in unwrap(model):
        for name, parameter in chunk.named_parameters():
            if not (param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)):
                continue
            # the others have the same; of experts fewer do, which ranks with copies of the rest share
            copy = ranks.data or ranks.context if getattr(parameter, "allreduce", True) else ranks.expert_copy
            if copy:
                continue
            gradient: torch.Tensor = parameter.main_grad
            part = _part(name, [layer.layer_number for layer in chunk.decoder.layers])
            squares[part] = squares.get(part, 0.0) + gradient.double().square().sum().item()
    everyone: list[dict[str, float]] = [{}] * ranks.world_size
    dist.all_gather_object(everyone, squares)
    total: dict[str, float] = {}
    for given in everyone:
        for part, square in given.items():
            total[part] = total.get(part, 0.0) + square
    return {part: total[part] ** 0.5 for part in sorted(total, key=_order)}


def _part(name: str, numbers: Sequence[int]) -> str:
    """Name the part of the model that a parameter belongs to, by the layer's number in the whole model."""
    layer = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        return "embedding" if name.startswith("embedding") else "final norm" if "norm" in name else "output"
    inside = layer.group(2)
    kind = "norms" if "norm" in inside else "attention" if inside.startswith("self_attention") else "MLP"
    return f"layer {numbers[int(layer.group(1))]} {kind}"


def _order(part: str) -> tuple[int, int, str]:
    """Sort as the model computes: the embedding, the layers, the final norm, the output matrix."""
    if part.startswith("layer"):
        return 1, int(part.split()[1]), part
    return (0 if part == "embedding" else 2 if part == "final norm" else 3), 0, part
