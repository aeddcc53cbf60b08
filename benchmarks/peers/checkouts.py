"""Import code from checkouts that are not installed, and describe what was measured."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from benchmarks.record import versions


def package(name: str, folder: Path) -> None:
    """Make a package's modules importable without its __init__, which may need a GPU or other packages."""
    if not folder.is_dir():
        raise SystemExit(f"{folder}: no such folder, needs a checkout that has the package {name} there")
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def absent(*names: str) -> None:
    """Make imports of modules that are not installed succeed; every name in them is an empty class."""

    def empty_class(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    for name in names:
        if name in sys.modules or ("." not in name and importlib.util.find_spec(name)):
            continue
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__getattr__ = empty_class  # type: ignore[method-assign]
        sys.modules[name] = module


def heading(module: str, **checkouts: Path | None) -> str:
    """Return the header of the results: date, machine, versions, commits and the command, with DIR for each path."""
    peers = []
    for name, folder in checkouts.items():
        if folder:
            command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "no git"
            peers.append(f"{name.replace('_', '-')} {commit}")
    found = [f"{name} {version}" for name, version in versions().items()]
    shown = ["DIR" if "/" in word else word for word in sys.argv[1:]]
    return (
        f"# {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} CPU cores, shared (load {os.getloadavg()[0]:.0f}), "
        f"{platform.machine()}; Python {platform.python_version()}, {', '.join([*found, *peers])}\n"
        f"# python -m benchmarks.peers.{module} {shlex.join(shown)}".rstrip()
    )
