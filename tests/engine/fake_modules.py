"""Stand-ins for modules of Transformer Engine."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


def empty(name: str) -> ModuleType:
    """A module as if it had been found."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of Transformer Engine, and the packages above it."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, empty(package))
    module = empty(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
