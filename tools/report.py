"""Report on a training run, or compare several.

python tools/report.py RUN_FOLDER                             writes report.png and report.html into it
python tools/report.py RUN_A RUN_B ... --output compare.png   overlays the runs' curves
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.monitoring.report import write_comparison, write_report
from megatron_ext.monitoring.runs import load_run, summarise


def _headline(folder: Path) -> str:
    summary = summarise(load_run(folder))
    if summary.initial_validation is None or summary.final_validation is None:
        return f"training loss {summary.initial_train_loss:.4f} at the start, {summary.final_train_loss:.4f} at the end"
    (first, before), (last, after) = summary.initial_validation, summary.final_validation
    return f"validation loss {before:.4f} after {first} steps, {after:.4f} after {last}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER", help="what training got as --save")
    parser.add_argument("--output", type=Path, metavar="PNG", help="comparison figure; needed with several folders")
    arguments = parser.parse_args(argv)
    several = len(arguments.runs) > 1
    if several and arguments.output is None:
        parser.error("--output: not given, needs a .png file with several run folders; add --output compare.png")
    if not several and arguments.output is not None:
        parser.error("--output: goes with several run folders; leave it out, the report goes into the run folder")
    try:
        path = write_comparison(arguments.runs, arguments.output) if several else write_report(*arguments.runs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not several:
        print(_headline(*arguments.runs))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
