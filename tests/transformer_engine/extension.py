"""Make the module `transformer_engine_torch` of kernels.py, as the C++ of a version declares it (signatures.json).

Calls are bound to the declared arguments, so one that pybind11 would refuse is refused here, and kernels get their
arguments by name. A function that kernels.py lacks raises NotImplementedError when it is called.
"""

import enum
import functools
import importlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "transformer_engine_torch"
calls: Counter[str] = Counter()  # of each function


class Extension(ModuleType):
    """A module in which classes of any name are found."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(f"{NAME} has no {name}")
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def install(folder: Path, *, emulated: bool) -> None:
    """Make the module of the version in `folder` importable; if it is not emulated, no function can be called."""
    declared = json.loads((folder / "signatures.json").read_text())
    extension = sys.modules[NAME] = Extension(NAME)
    for name, members in declared["enums"].items():
        setattr(extension, name, enum.IntEnum(name, members))
    kernels = importlib.import_module("tests.transformer_engine.kernels") if emulated else None  # it imports the enums
    for name, arguments in declared["functions"].items():
        setattr(extension, name, _function(name, arguments, getattr(kernels, name, None)))
    for name in ("CommOverlap", "CommOverlapP2P", "CommOverlapHelper"):
        setattr(extension, name, getattr(kernels, name, None))


def _function(name: str, arguments: list[tuple[str, bool]] | None, kernel: Callable[..., Any] | None) -> Any:
    if kernel is None:
        return functools.partial(_refuse, name)
    if arguments is None:
        return kernel
    parameters = []
    for argument, optional in arguments:
        default = {"default": None} if optional else {}
        parameters.append(inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, **default))
    signature = inspect.Signature(parameters, __validate_parameters__=False)

    @torch.no_grad()
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): incompatible function arguments: {error}") from error
        return kernel(**bound.arguments)

    return call


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"{NAME}.{name} was called, which is not emulated")
