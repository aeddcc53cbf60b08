"""Name the experts of gpt-oss one by one, because its files stack the matrices of all experts of a layer.

    in files                                      here, for each of E experts
    mlp.experts.gate_up_proj       [E, D, 2 F]    mlp.experts.{e}.gate_proj.weight, .up_proj.weight [F, D]
    mlp.experts.gate_up_proj_bias  [E, 2 F]       mlp.experts.{e}.gate_proj.bias, .up_proj.bias [F]
    mlp.experts.down_proj          [E, F, D]      mlp.experts.{e}.down_proj.weight [D, F]
    mlp.experts.down_proj_bias     [E, D]         mlp.experts.{e}.down_proj.bias [D]

The matrices are transposed, and columns of gate and up alternate. D: hidden size; F: width of an expert.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.(weight|bias)")


@dataclass(frozen=True)
class ExpertTensor:
    """One expert's matrix or bias in a stacked tensor."""

    name: str  # its name here
    stacked: str  # the stacked tensor's name in files
    expert: int  # its index
    # first, step: its rows are every `step`-th column of the stacked tensor from `first` on
    first: int
    step: int

    def shape(self, stacked: Sequence[int]) -> tuple[int, ...]:
        """Return its shape, given the stacked tensor's."""
        *_, last = stacked
        return (last // self.step, *stacked[1:-1])

    def read(self, stacked: Any) -> Tensor:
        """Read it from a safetensors slice of the stacked tensor."""
        expert: Tensor = stacked[self.expert : self.expert + 1][0, ..., self.first :: self.step]
        return expert.movedim(-1, 0).contiguous()


def expert_tensors(stacked: str, experts: int) -> Iterator[ExpertTensor]:
    """Yield the tensors of all experts of a stacked tensor."""
    match = _STACKED.fullmatch(stacked)
    assert match is not None
    module, matrices, bias = match.groups()
    names = matrices.split("_")
    for expert in range(experts):
        for first, name in enumerate(names):
            own = f"{module}.{expert}.{name}_proj.{'bias' if bias else 'weight'}"
            yield ExpertTensor(own, stacked, expert, first, len(names))


def is_stacked(name: str) -> bool:
    """Return whether a tensor in a file stacks the experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def name_in_files(name: str, stacks: bool) -> str:
    """Return the name of the tensor in files that contains the tensor `name`; `stacks`: whether the family stacks."""
    match = _EXPERT.fullmatch(name) if stacks else None
    if match is None:
        return name
    module, matrix, kind = match.groups()
    return f"{module}.{'down' if matrix == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"


def stack(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the stacked tensor of a name in files: of expert 0, its gate and up or its down, then of expert 1, ..."""
    step = 2 if "gate_up" in name else 1
    parts = torch.stack(list(tensors)).unflatten(0, (-1, step))  # [E, step, rows(, columns)]
    turned = parts.transpose(1, 2) if parts.ndim == 3 else parts.permute(0, 3, 2, 1)
    return turned.flatten(-2).contiguous()
