"""Loads a script by its file, where a module of its name may be loaded already."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(script: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; what lies beside it can be imported until the patches are undone."""
    monkeypatch.syspath_prepend(str(script.parent))
    name = f"{script.stem}_by_file"
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
