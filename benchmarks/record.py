"""Record results with their context: machine, versions, date and command."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "flash-attn-4",
    "apex",
    "liger-kernel",
)


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the figures."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return the device, the versions, the date and the command."""
    device = torch.cuda.get_device_name() if CUDA else f"{os.cpu_count()} cores {platform.machine()}"
    facts: dict[str, Any] = {"device": device, "python": platform.python_version(), "versions": versions()}
    if CUDA:
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        facts["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return facts | {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "command": f"python benchmarks/{command}"}


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option --output to a parser."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="file of JSON lines to append the results to")


class Records:
    """Prints results, one JSON object per line, and appends them to a file immediately.

    Each line includes the machine, so that the results before a failure are complete.

    Args:
        part: part of benchmarks/gpu.sh, stored under "part" in each line.
        output: the file; None to only print.
    """

    def __init__(self, part: str, output: Path | None) -> None:
        self.part, self.output, self.machine, self.failed = part, output, machine(), 0

    def add(self, **facts: Any) -> None:
        """Record a result; a result with `ok` False counts as failed."""
        self.failed += facts.get("ok") is False
        shown = {"part": self.part, **facts}
        print(json.dumps(shown), flush=True)
        if self.output:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            with self.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(shown | self.machine) + "\n")

    def error(self, error: Exception, **facts: Any) -> None:
        """Record an error in one line, and continue."""
        first = (str(error).splitlines() or [""])[0]
        self.add(**facts, ok=False, error=f"{type(error).__name__}: {first}"[:300])
