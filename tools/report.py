"""Write a report on a training run, or compare several runs.

python tools/report.py RUN_FOLDER                             writes report.png and report.html into it
python tools/report.py RUN_FOLDER                             for a run in stages: one report in each stage's folder
python tools/report.py RUN_A RUN_B ... --output compare.html  overlays the runs, with a table; .png: only the overlay
python tools/report.py RUN ... --evaluations DIR              adds the tables of tools/evaluate.py
python tools/report.py RUN ... --stability-steps 0 30000      prints SkyLadder's four stability figures of these steps
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ext.cli import Parser, command
from megatron_ext.monitoring.report import write_comparison, write_report
from megatron_ext.monitoring.runs import (
    Run,
    load_run,
    load_runs,
    stability_between,
    stage_folders,
    unlike_evaluations,
)


def _headline(run: Run) -> str:
    validation, training = run.validation().finite(), run.curve("lm_loss").finite().values
    if validation.values.size:
        (first, last), (before, after) = validation.steps[[0, -1]], validation.values[[0, -1]]
        return f"validation loss {before:.4f} after {first:.0f} steps, {after:.4f} after {last:.0f}"
    if not training.size:
        return "no step has a finite loss"
    return f"training loss {training[0]:.4f} at the start, {training[-1]:.4f} at the end"


def _report(folder: Path, evaluations: list[Path]) -> None:
    run = load_run(folder)
    path = write_report(folder, evaluations)
    if run.passage_note:
        print(f"note: {run.passage_note}; the report leaves it out", file=sys.stderr)
    print(_headline(run))
    print(path)


def _stability(folders: list[Path], first: int, end: int) -> None:
    """Print the stability figures of some steps, one line per run (arXiv 2503.15450, Table 9)."""
    print(f"{'steps ' + str(first) + ' to ' + str(end - 1):<32}volatility  smoothness  loss ratio  min(norm, 1)")
    for run in load_runs(folders):
        of = stability_between(run, first, end)
        figures = f"{of.volatility:>10.4f}{of.smoothness:>12.4f}{of.loss_ratio:>12.4f}{of.gradient_norm:>14.4f}"
        print(f"{run.name:<32}{figures}")


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER", help="what training got as --save")
    parser.add_argument("--output", type=Path, metavar="FILE", help="comparison, .html or .png; for several folders")
    parser.add_argument(
        "--evaluations",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="tables of what tools/evaluate.py wrote there, beside those in RUN_FOLDER/evaluations",
    )
    parser.add_argument(
        "--stability-steps",
        nargs=2,
        type=int,
        metavar=("FIRST", "END"),
        help="print volatility, smoothness, mean loss ratio and mean min(gradient norm, 1) of steps FIRST to END - 1",
    )
    arguments = parser.parse_args(argv)
    several = len(arguments.runs) > 1
    if several and arguments.output is None and arguments.stability_steps is None:
        parser.error("--output: not given, needs a file with several run folders; add --output compare.html")
    if not several and arguments.output is not None:
        parser.error("--output: goes with several run folders; leave it out, the report goes into the run folder")
    if arguments.evaluations and arguments.output is not None and arguments.output.suffix.lower() == ".png":
        parser.error("--evaluations: a .png has no tables; give --output compare.html")
    if arguments.stability_steps is not None:
        _stability(arguments.runs, *arguments.stability_steps)
        if several and arguments.output is None:
            return 0
    if several:
        print(write_comparison(arguments.runs, arguments.output, arguments.evaluations))
        unlike = unlike_evaluations(load_runs(arguments.runs))
        if unlike is not None:
            print(f"note: {unlike}", file=sys.stderr)
    else:
        for folder in stage_folders(arguments.runs[0]) or arguments.runs:
            _report(folder, arguments.evaluations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
