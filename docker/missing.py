"""Print the entries of lock files that this environment lacks, with their checksums.

python docker/missing.py requirements.lock docker/flash-attn-4.lock > missing.lock

An image for GPUs brings torch, Transformer Engine, flash-attn and Apex built for each other, under versions that no
index has. What is installed stays, whatever the first lock says of its version. The further locks are of what the image
may have in too old a version, such as FlashAttention 4's compiler: an older one is replaced. Only the standard library
and pip are imported.
"""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from pip._vendor.packaging.version import Version


def normalized(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(lock: str, installed: Mapping[str, str], *, newer: bool = False) -> str:
    """Return the entries whose package is not among the installed ones (normalized names), or with `newer` is older."""
    entries = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)[1:]  # before the first: comments
    found = []
    for entry in entries:
        name, version = re.match(r"([\w.-]+)(?:\[.*?\])?==([^\s;]+)", entry).groups()  # type: ignore[union-attr]
        here = installed.get(normalized(name))
        if here is None or (newer and Version(here) < Version(version)):
            found.append(entry)
    return "".join(found)


if __name__ == "__main__":
    here = {normalized(name): one.version for one in distributions() if (name := one.metadata["Name"])}
    for number, path in enumerate(sys.argv[1:]):
        sys.stdout.write(missing(Path(path).read_text(), here, newer=number > 0))
