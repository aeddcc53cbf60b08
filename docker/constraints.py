"""Constraints for pip in an image that already has packages: keep those, and take the pins for the rest.

python docker/constraints.py constraints.txt > kept.txt     one line per installed or pinned package
python docker/constraints.py --verify kept.txt              exit 1 if an installed package is not what kept.txt says

An image for GPUs brings torch, Transformer Engine, flash-attn and Apex built for each other, under versions that no
index has; pip must neither replace them nor what they were built against. Only the standard library is imported.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Version by normalized name; the first on sys.path is the one that is imported."""
    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name is not None:
            found.setdefault(normalized(name), distribution.version)
    return found


def pins(path: Path) -> dict[str, str]:
    """Version by normalized name, from lines `name==version`; comments and empty lines are passed over."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    parted = [line.partition("==") for line in lines if line]
    wrong = [name for name, equals, _ in parted if not equals]
    if wrong:
        sys.exit(f"{path}: got {wrong[0]!r}, needs lines name==version")
    return {normalized(name): version for name, _, version in parted}


def main(argv: list[str]) -> int:
    verify = argv[:1] == ["--verify"]
    if len(argv) != 1 + verify:
        print(__doc__, file=sys.stderr)
        return 2
    given, here = pins(Path(argv[-1])), installed()
    if verify:
        changed = [
            f"{name} {here[name]}, not {wanted}" for name, wanted in given.items() if here.get(name, wanted) != wanted
        ]
        if changed:
            print(f"installed: {'; '.join(changed)}", file=sys.stderr)
        return int(bool(changed))
    for name, version in sorted((given | here).items()):
        print(f"{name}=={version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
