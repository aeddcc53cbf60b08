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

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_ext.checkpoint.tensors import Shard
from megatron_ext.engine import compat
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
        return {"step": max(compat.adam_steps(part.optimizer) for part in self.parts)}

    def shards(self, weights: Sequence[Weight]) -> list[Shard]:
        """Return this process's part of the state as shards; data read into them takes effect with `load`."""
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
        return shards

    def load(self, counters: dict[str, Any]) -> None:
        """Apply the data read into the shards, and the counters."""
        for part, parameter, state in self._copies:
            compat.set_optimizer_states(part, parameter, state)
        for part in self.parts:
            if counters["step"]:
                compat.set_adam_steps(part.optimizer, counters["step"])

    def _runs(self, part: Any, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, int, int, dict[str, Tensor]]]:
        """Yield each weight, the range [start, end) of its flattened elements that is updated here, and its state."""
        if isinstance(part, DistributedOptimizer):
            if not part.optimizer.state:  # before the first update
                compat.begin_optimizer_states(part)
            for parameter, start, end in compat.updated_ranges(part):
                state = compat.optimizer_states(part, parameter)
                if compat.has_lowered_states(part):
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
