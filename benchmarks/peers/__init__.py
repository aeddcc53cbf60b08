"""Comparisons with other projects on the same work; docs/comparison.md has the results.

Run from the repository's root: python -m benchmarks.peers.plans --magi-attention DIR, and so on. Each takes the paths
of checkouts, which need not be installed; none of their code is included here.
"""

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[1]))  # the other benchmarks are scripts that import each other this way


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


def commits(**checkouts: Path | None) -> dict[str, str]:
    """Return the commit of each checkout that was given."""
    commit_of = {}
    for name, folder in checkouts.items():
        if folder:
            command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            commit_of[name] = done.stdout.strip() or "no git"
    return commit_of
