"""Describe an optimizer's state as shards of a checkpoint, in one format for every kind of Megatron optimizer.

    optimizer.state.exp_avg.<weight>, .exp_avg_sq.<weight>     the moments, float32, sharded like the weight itself
    optimizer.state.momentum_buffer.<weight>                   instead of them, of a matrix that Muon updates
    optimizer.state.fp32_param.<weight>                        the master weight, only with bf16
    Manifest.optimizer                                         {"step": Adam's count}

Learning rate and weight decay are functions of the step, the betas are options: none of them is saved. A distributed
optimizer holds a contiguous range of each flattened weight; each process saves and loads its range as rectangles of the
weight. So the state of a distributed optimizer can be loaded into a plain one and vice versa, under any layout.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_ext.checkpoint.tensors import Shard
from megatron_ext.engine.optimizer import parts_of
from megatron_ext.engine.weights import Weight


class OptimizerState:
    """Saves and loads the state of an optimizer, for each part that `parts_of` returns."""

    def __init__(self, optimizer: MegatronOptimizer, bf16: bool) -> None:
        self.parts = parts_of(optimizer)
        # name of the master weight in the optimizer and in checkpoints; without bf16 it is the weight itself
        self._master: dict[str, str] = {}
        if bf16:
            self._master = {"param": "fp32_param"}
        self._copies: list[tuple[Any, Tensor, dict[str, Tensor]]] = []  # float32 copies of lower-precision states

    def counters(self) -> dict[str, Any]:
        """Return the state other than tensors; the same on every process that holds a parameter."""
        return {"step": max(adam_steps(part.optimizer) for part in self.parts)}

    def shards(self, weights: Sequence[Weight], *, to_load: bool = False) -> list[Shard]:
        """Return this process's part of the state as shards; with `to_load`, data read into them is set by `load`."""
        self._copies = []
        shards: list[Shard] = []
        by_parameter = {weight.parameter: weight for weight in weights}
        for part in self.parts:
            names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            if "momentum" in part.optimizer.defaults:  # of Muon
                names = {"momentum_buffer": "momentum_buffer"}
            for parameter, start, end, state in self._runs(part, by_parameter):
                weight = by_parameter[parameter]
                writes = weight.original if isinstance(part, DistributedOptimizer) else weight.first_copy
                for key, name in (names | self._master).items():
                    run = state[key].detach().view(-1)
                    shards += _rectangles(f"optimizer.state.{name}.", weight.shards, run, start, end, writes=writes)
        if not to_load:
            self._copies = []
        return shards

    def load(self, counters: dict[str, Any]) -> None:
        """Apply the data read into the shards, and the counters."""
        for part, parameter, state in self._copies:
            set_optimizer_states(part, parameter, state)
        self._copies = []
        for part in self.parts:
            if counters["step"]:
                set_adam_steps(part.optimizer, counters["step"])

    def _runs(self, part: Any, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, int, int, dict[str, Tensor]]]:
        """Yield each weight, the range [start, end) of its flattened elements that is updated here, and its state."""
        if isinstance(part, DistributedOptimizer):
            if not part.optimizer.state:  # before the first update
                begin_optimizer_states(part)
            for parameter, start, end in updated_ranges(part):
                state = optimizer_states(part, parameter)
                if has_lowered_states(part):
                    self._copies.append((part, parameter, state))
                yield parameter, start, end, state
            return
        part.init_state_fn(part.optimizer, part.config)
        masters = {parameter: getattr(parameter, "main_param", parameter) for parameter in parameters}
        assert part.optimizer.state.keys() <= set(masters.values())
        for parameter, master in masters.items():
            if master in part.optimizer.state:  # not the weights of the other part
                yield parameter, 0, parameter.numel(), part.optimizer.state[master] | {"param": master}


def _rectangles(
    prefix: str, parts: Sequence[Shard], run: Tensor, start: int, end: int, *, writes: bool
) -> Iterator[Shard]:
    """Split a range, elements start..end of the flattened weight that `parts` make up, into rectangles of the parts.

    A part of 4 columns needs at most three:   . . a a      a: the end of a row
                                               b b b b      b: whole rows
                                               b b b b
                                               c . . .      c: the beginning of a row
    """
    begin = 0  # first element of the part in the flattened weight
    for part in parts:
        columns = math.prod(part.sizes[1:])
        at = max(start - begin, 0)
        last = min(end - begin, part.sizes[0] * columns)
        while at < last:
            row, column = divmod(at, columns)
            height = 1
            width = min(columns - column, last - at)
            if width == columns:
                height = (last - at) // columns
            first = begin + at - start
            data = run[first : first + height * width].view((height, width)[: len(part.sizes)])
            offset = tuple(origin + inside for origin, inside in zip(part.offset, (row, column), strict=False))
            yield Shard.of(prefix + part.name, data, part.shape, offset, writes=writes)
            at += height * width
        begin += part.sizes[0] * columns


# Functions that use private names of Megatron's optimizers; each says when to remove it


def begin_optimizer_states(optimizer: Any) -> None:
    """Initialize the state of a distributed optimizer before its first step: zero moments, and master weights.

    Megatron's `init_state_fn` does not support precision-aware optimizers, and is None for offloaded ones. Remove when
    it supports both.
    """
    inner = optimizer.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        for part in inner.sub_optimizers:
            for parameter in (parameter for group in part.param_groups for parameter in group["params"]):
                part.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                if isinstance(part, torch.optim.AdamW):
                    part.state[parameter]["step"] = torch.zeros(())
        inner._sync_sub_optimizers_state_to_hdo()
    elif optimizer.config.use_precision_aware_optimizer:
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            inner.initialize_state(parameter, store_param_remainders=False)
    else:
        optimizer.init_state_fn(inner, optimizer.config)


def updated_ranges(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yield the weights that a distributed optimizer updates here, and which of their flattened elements: start, end.

    Remove when the optimizer has a public list of them.
    """
    for by_dtype in optimizer.gbuf_ranges:
        for bucket in (bucket for buckets in by_dtype.values() for bucket in buckets):
            for weight, ranges in bucket["param_map"].items():
                yield weight, ranges["param"].start, ranges["param"].end


def optimizer_states(optimizer: Any, weight: Tensor) -> dict[str, Tensor]:
    """Return this process's part of a weight in a distributed optimizer: master weight ("param") and moments, float32.

    They are the optimizer's own memory, except for states that a precision-aware optimizer keeps in another dtype. The
    optimizer's public state dict returns copies by bucket. Remove when it returns them by weight.
    """
    states: dict[str, Tensor] = optimizer._get_main_param_and_optimizer_states(weight)
    inner = optimizer.optimizer
    if has_lowered_states(optimizer):
        parameter = _inner_parameter(optimizer, weight)
        states |= {name: inner.get_unscaled_state(parameter, name) for name in ("exp_avg", "exp_avg_sq")}
    return states


def set_optimizer_states(optimizer: Any, weight: Tensor, states: dict[str, Tensor]) -> None:
    """Store changed states, as returned by `optimizer_states`, in the dtypes of a precision-aware optimizer."""
    inner = optimizer.optimizer
    parameter = _inner_parameter(optimizer, weight)
    for name in ("exp_avg", "exp_avg_sq"):
        inner.set_scaled_state(parameter, name, states[name])
    if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        inner.set_scaled_state(parameter, "master_param", states["param"])  # otherwise it is Megatron's own memory


def has_lowered_states(optimizer: Any) -> bool:
    """Return whether a distributed optimizer stores its states as Transformer Engine's precision-aware Adam does."""
    offloaded = isinstance(optimizer.optimizer, HybridDeviceOptimizer)
    return bool(optimizer.config.use_precision_aware_optimizer) and not offloaded


def _inner_parameter(optimizer: Any, weight: Tensor) -> Tensor:
    group, place = optimizer.model_param_group_index_map[weight]
    parameter: Tensor = optimizer.optimizer.param_groups[group]["params"][place]
    return parameter


def _adams(inner: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the parts of an offloaded Adam, or the Adam itself."""
    if isinstance(inner, HybridDeviceOptimizer):
        return list(inner.sub_optimizers)
    return [inner]


def adam_steps(inner: torch.optim.Optimizer) -> int:
    """Return the step count of an Adam, which is in its groups or, if it is offloaded, in its parts."""
    parts = _adams(inner)
    groups = [int(group["step"]) for part in parts for group in part.param_groups if "step" in group]
    states = [int(state["step"]) for part in parts for state in part.state.values() if "step" in state]
    return max(groups + states, default=0)


def set_adam_steps(inner: torch.optim.Optimizer, steps: int) -> None:
    for part in _adams(inner):
        for group in part.param_groups:
            group["step"] = steps
        for state in part.state.values():
            if "step" in state:
                state["step"].fill_(steps)
