"""A Transformer Engine that can be imported anywhere and computes nowhere but on CUDA, as the real one.

Every submodule exists; in it a capitalised name is a class, any other a module that refuses to be called.
Made for Megatron's imports, which decide by them what it calls (tests/engine/test_compat.py puts it on the path).
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__version__ = "2.11.0"
UNFUSED = os.environ.get("NVTE_UNFUSED_ATTN")  # as it was at the import


def _refuse(*arguments: Any, **named: Any) -> None:
    """Do as a CUDA kernel does that is handed a CPU's tensor."""
    raise RuntimeError("transformer_engine: a CUDA kernel was called on a CPU")


class _Adam(torch.optim.Optimizer):
    """Is made like any optimizer, and cannot step."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = None, eps: float = 1e-8, **others: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": others.get("weight_decay", 0)})

    step = _refuse  # type: ignore[assignment]


# What is plain Python, and runs on a CPU.
_PLAIN = {
    "FusedAdam": _Adam,
    "_SplitAlongDim": SimpleNamespace(apply=lambda tensor, dim, sizes, *unused: torch.split(tensor, sizes, dim)),
    "get_cpu_offload_context": lambda *unused, **named: (contextlib.nullcontext(), lambda tensor: tensor),
}


class _Everything(ModuleType):
    """A module in which every public name is found."""

    __path__: Sequence[str] = ()
    __version__ = __version__
    __call__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _PLAIN.get(name)
        if made is None:
            made = type(name, (torch.nn.Module,), {}) if name[0].isupper() else _Everything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all of `transformer_engine.*`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Everything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())

from transformer_engine import common, pytorch  # noqa: E402, F401
