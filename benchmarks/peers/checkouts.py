"""Import code from checkouts that are not installed, and describe the measured versions."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from benchmarks.record import versions


def package(name: str, folder: Path) -> None:
    """Make a package's modules importable without its __init__, which may need a GPU or other packages.

    Raises:
        SystemExit: the folder does not exist.
    """
    if not folder.is_dir():
        raise SystemExit(f"{folder}: no such folder, needs a checkout that has the package {name} there")
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def absent(*names: str) -> None:
    """Make imports of modules that are not installed succeed; every name in them is an empty class."""
    for name in names:
        if name in sys.modules or ("." not in name and importlib.util.find_spec(name)):
            continue
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__getattr__ = _empty_class  # type: ignore[method-assign]
        sys.modules[name] = module


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def commit(folder: Path) -> str:
    """Return the first digits of a checkout's commit, or "no git"."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "no git"


def heading(module: str, **checkouts: Path | None) -> str:
    """Return the header of the results: date, machine, versions, commits and the command.

    Paths are replaced by DIR in the command.
    """
    now, load = datetime.now(UTC), os.getloadavg()[0]
    found = [f"{name} {version}" for name, version in versions().items()]
    peers = [f"{name.replace('_', '-')} {commit(folder)}" for name, folder in checkouts.items() if folder]
    shown = [
        ("DIR" + word[word.index("/bin/") :] if "/bin/" in word else "DIR") if "/" in word else word
        for word in sys.argv[1:]
    ]
    return (
        f"# {now:%Y-%m-%d}, {os.cpu_count()} CPU cores, shared (load {load:.0f}), {platform.machine()}; "
        f"Python {platform.python_version()}, {', '.join([*found, *peers])}\n"
        f"# python -m benchmarks.peers.{module} {shlex.join(shown)}".rstrip()
    )


def processor_seconds(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time each case in alternating rounds, so that other work on the machine affects all equally.

    Returns:
        The minimum processor seconds of each case, which exclude other processes.
    """
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, work in cases.items():
            began = time.process_time()
            work()
            least[name] = min(least[name], time.process_time() - began)
    return least
