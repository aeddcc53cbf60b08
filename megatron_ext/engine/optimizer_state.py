"""Save and load Adam's state in one form for every kind of Megatron optimizer.

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
from megatron_ext.engine import compat


class OptimizerState:
    """Reads and writes the state of an optimizer in the saved form; under expert parallelism it has two parts."""

    def __init__(self, optimizer: MegatronOptimizer, bf16: bool) -> None:
        parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        self.parts = [_Part(part, bf16) for part in parts]

    def counters(self) -> dict[str, Any]:
        """Return what is no tensor; the same on every process that holds a parameter."""
        return self.parts[0].counters()

    def sharded(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Return Megatron's sharded tensors of the state, keyed as the module says; the moments exist, if only as 0.

        Args:
            model_state: the sharded state of all model chunks.
        """
        return {f"part{number}": part.sharded(model_state) for number, part in enumerate(self.parts)}

    @torch.no_grad()
    def load(self, state: dict[str, Any], counters: dict[str, Any]) -> None:
        """Take over what was read in the form of `sharded`; a distributed optimizer's was read in place.

        In place of copies, where the optimizer keeps other types.
        """
        for number, part in enumerate(self.parts):
            part.load(state[f"part{number}"], counters)


class _Part:
    """Reads and writes the state of one optimizer."""

    def __init__(self, optimizer: MegatronOptimizer, bf16: bool) -> None:
        self.optimizer: Any = optimizer
        self.bf16 = bf16
        self._copies: list[tuple[Tensor, dict[str, Tensor]]] = []  # float32 states of weights, of what is kept lower

    def counters(self) -> dict[str, Any]:
        """Return what is no tensor."""
        scaler = getattr(self.optimizer, "grad_scaler", None)
        return {"step": compat.adam_steps(self.optimizer.optimizer)} | (
            {"grad_scaler": scaler.state_dict()} if scaler else {}
        )

    def sharded(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Return the sharded tensors of the weights that this optimizer updates."""
        if isinstance(self.optimizer, DistributedOptimizer):
            return {"runs": dict(enumerate(self._runs(model_state)))}
        state = self.optimizer.sharded_state_dict(model_state, is_loading=True)
        if isinstance(self.optimizer, Float16OptimizerWithFloat16Params):
            return {"moments": state["optimizer"]["state"], "masters": state["fp32_from_fp16_params"]}
        return {"moments": state["state"]}

    def load(self, state: dict[str, Any], counters: dict[str, Any]) -> None:
        """Take over what was read in the form of `sharded`."""
        if not isinstance(self.optimizer, DistributedOptimizer):
            inner = self.optimizer.optimizer
            parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
            for number, moments in state["moments"].items():
                for name, tensor in moments.items():
                    inner.state[parameters[number]][name].copy_(tensor)
        if isinstance(self.optimizer, Float16OptimizerWithFloat16Params):
            for masters, loaded in zip(self.optimizer.fp32_from_float16_groups, state["masters"], strict=True):
                for master, tensor in zip(masters, loaded, strict=True):
                    master.copy_(tensor)
        for weight, states in self._copies:
            compat.set_optimizer_states(self.optimizer, weight, states)
        if counters["step"]:
            compat.set_adam_steps(self.optimizer.optimizer, counters["step"])
        scaler = getattr(self.optimizer, "grad_scaler", None)
        if scaler and "grad_scaler" in counters:
            scaler.load_state_dict(counters["grad_scaler"])

    def _runs(self, model_state: dict[str, Any]) -> Iterator[ShardedTensor]:
        """Yield this process's part of a distributed optimizer: rectangles whose data is the state's own memory."""
        optimizer = self.optimizer
        if not optimizer.optimizer.state:  # before the first update
            compat.begin_optimizer_states(optimizer)
        self._copies = []
        sharded = {value.data: value for value in nested_values(model_state)}
        buckets = (bucket for by_dtype in optimizer.gbuf_ranges for each in by_dtype.values() for bucket in each)
        for weight, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
            start, end = ranges["param"].start, ranges["param"].end  # of the run, in the flattened weight
            states = compat.optimizer_states(optimizer, weight)
            if compat.has_lowered_states(optimizer):
                self._copies.append((weight, states))
            tensors = {name: states[name] for name in ("exp_avg", "exp_avg_sq")}
            if self.bf16:  # otherwise the master is the weight itself
                tensors["fp32_param"] = states["param"]
            # a weight is saved as itself, or, where Megatron has a factory for it, as gate and up of a SwiGLU matrix
            saved = sharded[weight]
            built = saved.build() if isinstance(saved, ShardedTensorFactory) else saved
            for piece in nested_values(built) if isinstance(built, dict | list) else [built]:
                for name, tensor in tensors.items():
                    yield from _cut(piece, weight, tensor.detach(), start, end, f"optimizer.state.{name}.{piece.key}")


def _cut(piece: ShardedTensor, weight: Tensor, run: Tensor, start: int, end: int, key: str) -> Iterator[ShardedTensor]:
    """Cut out the part of `run`, elements start..end of the flattened weight, that lies in `piece`."""
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
        corner = (part.row, part.column)[: local.ndim]
        leading = len(piece.global_offset) - local.ndim
        yield ShardedTensor(
            key=key,
            data=run[offset : offset + part.size].view((1,) * leading + shape),
            dtype=run.dtype,
            local_shape=(1,) * leading + shape,
            global_shape=piece.global_shape,
            global_offset=tuple(
                at + inside for at, inside in zip(piece.global_offset, (0,) * leading + corner, strict=True)
            ),
            axis_fragmentations=None,  # no regular grid
            replica_id=(*piece.replica_id[:2], 0),  # among data-parallel processes only this one has it
        )
