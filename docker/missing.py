"""Print the entries of a lock file whose packages this environment lacks, with their checksums.

python docker/missing.py requirements.lock > missing.lock

An image for GPUs brings torch, Transformer Engine, flash-attn and Apex built for each other, under versions that no
index has. What is installed stays; the rest comes from the lock. Only the standard library is imported.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def normalized(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(lock: str, installed: set[str]) -> str:
    """Return the entries whose package is not among the installed ones (normalized names)."""
    entries = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)[1:]  # before the first: comments
    named = [(re.match(r"[\w.-]+", entry), entry) for entry in entries]
    return "".join(entry for name, entry in named if name and normalized(name[0]) not in installed)


if __name__ == "__main__":
    here = {normalized(name) for distribution in distributions() if (name := distribution.metadata["Name"])}
    sys.stdout.write(missing(Path(sys.argv[1]).read_text(), here))
