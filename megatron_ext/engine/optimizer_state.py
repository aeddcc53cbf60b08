"""One saved form of Adam's state for every kind of Megatron optimizer.

    optimizer.state.exp_avg.<weight>, .exp_avg_sq.<weight>     the moments, float32, cut like the weight itself
    optimizer.state.fp32_param.<weight>                        the master weight, under bf16 alone
    Manifest.optimizer                                         {"step": Adam's count, "grad_scaler": ... if any}

Learning rate and weight decay are functions of the step, the betas are options: neither is saved. A distributed
optimizer holds a run of each flattened weight; it saves and loads that run as rectangles of the weight, each
process its own, with no communication. So its state loads into a plain optimizer and the other way round, under
any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megatron_ext.checkpoint.formats.rectangles import rectangles


class OptimizerState:
    """The state of one optimizer, read and written in the saved form."""

    def __init__(self, optimizer: MegatronOptimizer, bf16: bool) -> None:
        if isinstance(optimizer, ChainedOptimizer):
            (optimizer,) = optimizer.chained_optimizers
        self.optimizer: Any = optimizer
        self.bf16 = bf16

    def counters(self) -> dict[str, Any]:
        """What is no tensor; the same on every process that holds a parameter."""
        steps = [int(group["step"]) for group in self.optimizer.param_groups if "step" in group]
        scaler = getattr(self.optimizer, "grad_scaler", None)
        return {"step": max(steps, default=0)} | ({"grad_scaler": scaler.state_dict()} if scaler else {})

    def sharded(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Megatron's sharded tensors of the state, keyed as the module says; the moments exist, if only as 0.

        Args:
            model_state: the sharded state of all model chunks.
        """
        if isinstance(self.optimizer, DistributedOptimizer):
            return {"runs": dict(enumerate(self._runs(model_state)))}
        found = self.optimizer.sharded_state_dict(model_state, is_loading=True)
        if isinstance(self.optimizer, Float16OptimizerWithFloat16Params):
            return {"moments": found["optimizer"]["state"], "masters": found["fp32_from_fp16_params"]}
        return {"moments": found["state"]}

    @torch.no_grad()
    def load(self, state: dict[str, Any], counters: dict[str, Any]) -> None:
        """Take over what was read in the form of `sharded`; a distributed optimizer's was read in place."""
        if not isinstance(self.optimizer, DistributedOptimizer):
            self._load_plain(state)
        if counters["step"]:
            for group in self.optimizer.param_groups:
                group["step"] = counters["step"]
        scaler = getattr(self.optimizer, "grad_scaler", None)
        if scaler and "grad_scaler" in counters:
            scaler.load_state_dict(counters["grad_scaler"])

    def _load_plain(self, state: dict[str, Any]) -> None:
        inner = self.optimizer.optimizer
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        for number, moments in state["moments"].items():
            for name, tensor in moments.items():
                inner.state[parameters[number]][name].copy_(tensor)
        if isinstance(self.optimizer, Float16OptimizerWithFloat16Params):
            for masters, loaded in zip(self.optimizer.fp32_from_float16_groups, state["masters"], strict=True):
                for master, tensor in zip(masters, loaded, strict=True):
                    master.copy_(tensor)

    def _runs(self, model_state: dict[str, Any]) -> Iterator[ShardedTensor]:
        """This process's part of a distributed optimizer: rectangles whose data is the state's own memory."""
        optimizer = self.optimizer
        if not optimizer.optimizer.state:  # before the first update
            optimizer.load_state_dict(optimizer.state_dict())
            for moments in optimizer.optimizer.state.values():
                for tensor in moments.values():
                    tensor.zero_()
        sharded = {value.data: value for value in nested_values(model_state)}
        for weight, start, end in self._owned():
            states = optimizer._get_main_param_and_optimizer_states(weight)
            tensors = {name: states[name] for name in ("exp_avg", "exp_avg_sq")}
            if self.bf16:  # otherwise the master is the weight itself
                tensors["fp32_param"] = states["param"]
            for piece in _pieces(sharded[weight]):
                for name, tensor in tensors.items():
                    yield from _cut(piece, weight, tensor.detach(), start, end, f"optimizer.state.{name}.{piece.key}")

    def _owned(self) -> Iterator[tuple[Tensor, int, int]]:
        """Each weight of which this process has a run, and the run: start and end in the flattened weight."""
        for by_dtype in self.optimizer.gbuf_ranges:
            for buckets in by_dtype.values():
                for bucket in buckets:
                    for weight, ranges in bucket["param_map"].items():
                        yield weight, ranges["param"].start, ranges["param"].end


def _pieces(sharded: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """The saved tensors that a weight is made of: itself, or gate and up of a SwiGLU matrix."""
    if isinstance(sharded, ShardedTensorFactory):
        built = sharded.build()
        return list(nested_values(built)) if isinstance(built, dict | list) else [built]
    return [sharded]


def _cut(piece: ShardedTensor, weight: Tensor, run: Tensor, start: int, end: int, key: str) -> Iterator[ShardedTensor]:
    """The part of `run`, elements start..end of the flattened weight, that lies in `piece`."""
    local = piece.data
    assert local.is_contiguous()
    assert local.ndim <= 2
    assert run.numel() == end - start
    begin = (local.data_ptr() - weight.data_ptr()) // weight.element_size()
    columns = local.shape[1] if local.ndim == 2 else 1
    first, last = max(start - begin, 0), min(end - begin, local.numel())
    for part in rectangles(columns, first, last):
        offset = begin + part.row * columns + part.column - start
        shape = (part.height, part.width)[: local.ndim]
        place = (part.row, part.column)[: local.ndim]
        leading = len(piece.global_offset) - local.ndim
        yield ShardedTensor(
            key=key,
            data=run[offset : offset + part.size].view((1,) * leading + shape),
            dtype=run.dtype,
            local_shape=(1,) * leading + shape,
            global_shape=piece.global_shape,
            global_offset=tuple(
                at + inside for at, inside in zip(piece.global_offset, (0,) * leading + place, strict=True)
            ),
            axis_fragmentations=None,  # no regular grid
            replica_id=(*piece.replica_id[:2], 0),  # among data-parallel processes only this one has it
        )
