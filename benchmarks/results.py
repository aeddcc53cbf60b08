"""Write the results of benchmarks/gpu.sh as a page: python benchmarks/results.py FILE.jsonl [--output FILE.md]"""

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from record import CONTEXT, parser_of

Record = dict[str, Any]
TITLES = {
    "machine": "Machine",
    "correct": "Correctness",
    "two": "Two GPUs",
    "step": "Training steps",
    "attention": "Attention kernels",
    "length": "Longest rows",
    "experts": "Grouped experts",
    "fp8": "FP8",
    "loss_head": "Loss head",
}
LISTS = {"kernels", "text"}  # facts that are no cells of tables
KINDS = ("case", "head", "window", "summary", "skipped", "error")  # results with other ones of these have a table each


def read(path: Path, offset: int = 0) -> list[Record]:
    """Return the results that a file has from a byte on, without the lines that only say that one began."""
    lines = path.read_bytes()[offset:].splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if not record.get("began")]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; floats have four digits."""
    cells = [
        [f"{cell:.4g}" if isinstance(cell, float) else str(cell).replace("|", "/") for cell in row] for row in rows
    ]
    return [f"| {' | '.join(row)} |" for row in [list(head), ["---"] * len(head), *cells]] + [""]


def verdicts(records: Iterable[Record]) -> list[str]:
    """Return the table of attention kernels, and the reasons for what is not right.

    A cell is right, wrong, cannot or died, or "not run" if the time was over; in parentheses the largest error over
    plain half precision's.
    """
    checks = [record for record in records if record["part"] == "correct" and "backend" in record]
    cases = list(dict.fromkeys(record["case"] for record in checks if "case" in record))
    backends = list(dict.fromkeys(record["backend"] for record in checks))
    verdict_of: dict[tuple[str, str], str] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in checks:
        backend = record["backend"]
        reason = record.get("skipped") or record.get("error") or ""
        if record.get("died"):
            verdict = "died"
        elif reason:
            verdict = "cannot"
        else:
            reason = ", ".join(record["wrong"])
            verdict = f"{'wrong' if reason else 'right'} ({record['over_plain']:.2g})"
        for case in [record["case"]] if "case" in record else cases:
            verdict_of[backend, case] = verdict
        if reason:
            reasons.setdefault((backend, reason), []).append(record.get("case", "all"))
    rows = [[case, *(verdict_of.get((backend, case), "not run") for backend in backends)] for case in cases]
    lines = table(["case", *backends], rows) if cases else []
    return lines + [f"- {backend}, {', '.join(named)}: {reason}" for (backend, reason), named in reasons.items()] + [""]


def times(records: Iterable[Record]) -> list[str]:
    """Return the table of attention kernels by row and layout: milliseconds of both passes, and which is fastest."""
    measured: dict[tuple[int, str], dict[str, float]] = {}
    for record in records:
        if "forward_ms" in record:
            by_backend = measured.setdefault((record["row"], record["layout"]), {})
            by_backend[record["backend"]] = record["forward_ms"] + record["backward_ms"]
    backends = list(dict.fromkeys(itertools.chain(*measured.values())))
    rows = [
        [*layout, *(by_backend.get(backend, "") for backend in backends), min(by_backend, key=by_backend.__getitem__)]
        for layout, by_backend in measured.items()
    ]
    return table(["row", "layout", *backends, "fastest"], rows) if rows else []


def page(records: Sequence[Record]) -> str:
    """Return a page: the machine, what failed, and a table for each part and kind of result."""
    first = next((record for record in records if "memory_gib" in record), records[-1])  # of a process with CUDA
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [f"# {first['device']}, {first['date']}", "", f"Python {first['python']}, {versions}.", ""]
    summaries = {"correct": verdicts, "attention": times}
    bad = sum(record.get("ok") is False for record in records)
    lines += [f"{len(records)} results, of which {bad} failed.", ""]
    for part in dict.fromkeys(record["part"] for record in records):
        records_of_part = [record for record in records if record["part"] == part]
        lines += [f"## {TITLES.get(part, part)}", "", *summaries.get(part, lambda _: [])(records_of_part)]
        kinds: dict[tuple[bool, ...], list[Record]] = {}
        for record in records_of_part:
            if not (part == "correct" and "backend" in record) and not record.keys() & LISTS:
                kinds.setdefault(tuple(name in record for name in KINDS), []).append(record)
        for alike in kinds.values():
            names = [name for name in dict.fromkeys(itertools.chain(*alike)) if name not in CONTEXT]
            lines += table(names, [[record.get(name, "") for name in names] for record in alike])
        for record in records_of_part:
            text = record.get("text")
            if text:
                lines += ["```", text if isinstance(text, str) else "\n".join(text), "```", ""]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    records = read(options.file)
    if not records:
        print(f"benchmarks/results.py: {options.file} has no results", file=sys.stderr)
        return 1
    text = page(records)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
