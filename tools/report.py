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
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
