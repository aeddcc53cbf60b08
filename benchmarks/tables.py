"""Writes docs/benchmarks.md from benchmarks/results: python benchmarks/tables.py [--check]

Nothing in it is typed by hand: a file of JSON lines (benchmarks/gpu.sh) becomes a table per part, a text file is shown
as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
MACHINE = ("device", "memory_gib", "python", "cuda", "cudnn", "versions", "threads", "date")
HEAD = """# Benchmarks

Raw results as they were measured, each with its machine, versions, date and command. The page is made by
`python benchmarks/tables.py` from `benchmarks/results/`; ratios are of one run on one machine.

`benchmarks/gpu.sh` measures on a CUDA card, part by part: kernels against fp32, attention by window, whole steps, the
longest row, the loss head, token weighting, and the effect of a growing window.
"""


def page() -> str:
    """Return the whole page."""
    files = sorted(RESULTS.iterdir(), reverse=True)
    cards = [file for file in files if file.suffix == ".jsonl" and "-cpu" not in file.stem]
    rest = [file for file in files if file not in cards]
    lines = [
        HEAD,
        "## On a card\n",
        *(itertools.chain(*map(section, cards)) if cards else ["No card has run them yet.\n"]),
    ]
    lines += ["## On a CPU\n", *itertools.chain(*map(section, rest))]
    return "\n".join(lines)


def section(file: Path) -> Iterator[str]:
    """Yield the lines that show one file."""
    yield f"### `benchmarks/results/{file.name}`\n"
    if file.suffix != ".jsonl":
        yield f"```\n{file.read_text(encoding='utf-8').rstrip()}\n```\n"
        return
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for _, group in itertools.groupby(records, key=lambda record: (record.get("command"), tuple(measured(record)))):
        alike = list(group)
        facts = ", ".join(f"{name} {shown(alike[0][name])}" for name in MACHINE if name in alike[0])
        yield f"`{alike[0].get('command')}` ({facts})\n"
        columns = list(measured(alike[0]))
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---|' * len(columns)}"
        for record in alike:
            yield f"| {' | '.join(shown(record[name]) for name in columns)} |"
        yield ""


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a record says beside its machine."""
    return {name: value for name, value in record.items() if name not in (*MACHINE, "command", "machine")}


def shown(value: Any) -> str:
    """Write a value in a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is not up to date")
    options = parser.parse_args()
    if options.check:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
