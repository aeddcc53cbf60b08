"""Write a report on a training run, or compare several runs.

python tools/report.py RUN                                    writes report.html into it and into its stages
python tools/report.py RUN_A RUN_B ... --output compare.html  overlays the runs, with a table
python tools/report.py RUN ... --evaluations DIR              adds the tables of tools/evaluate.py
python tools/report.py RUN ... --stability-steps 0 30000      prints SkyLadder's four stability figures of these steps
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.cli import MANY, Parser, command, output_file
from megatron_ext.monitoring.metrics import stage_folders

if TYPE_CHECKING:
    from megatron_ext.monitoring.report import Run


def headline(run: "Run") -> str:
    """Return the first and last validation losses of a run, or training losses if it was not validated."""
    validation = run.validation.get("valid_loss")
    if validation is not None:
        first, last = validation.steps[[0, -1]]
        before, after = validation.values[[0, -1]]
        return f"validation loss {before:.4f} after {first:.0f} steps, {after:.4f} after {last:.0f}"
    losses = run.curve("lm_loss").values
    if not losses.size:
        return "no step has a finite loss"
    return f"training loss {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end"


def print_stability(folders: list[Path], first: int, end: int) -> None:
    """Print the stability figures of some steps, one line per run (arXiv 2503.15450, Table 9)."""
    from megatron_ext.monitoring.report import load_runs, stability_between

    runs = load_runs(folders)
    print(f"{f'steps {first} to {end - 1}':<32}volatility  smoothness  loss ratio  min(norm, 1)")
    for run in runs:
        figures = stability_between(run, first, end).values()
        print(f"{run.name:<32}" + "".join(f"{figure:>10.4f}  " for figure in figures))


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_FOLDER", help="what training got as --save")
    add("--output", type=output_file(".html"), metavar="FILE", help="the page, an .html; for several folders")
    add("--evaluations", **MANY, type=Path, default=[], metavar="DIR", help="folders that tools/evaluate.py wrote")
    add(
        "--stability-steps", nargs=2, type=int, metavar=("FIRST", "END"), help="print figures of steps FIRST to END - 1"
    )
    options = parser.parse_args(argv)
    several = len(options.runs) > 1
    if several and options.output is None and options.stability_steps is None:
        parser.error("--output: not given, needs a file with several run folders; add --output compare.html")
    if not several and options.output is not None:
        parser.error("--output: goes with several run folders; leave it out, the report goes into the run folder")
    from megatron_ext.monitoring.report import join_stages, load_run, load_runs, write_report  # imports torch: seconds

    if options.stability_steps is not None:
        print_stability(options.runs, *options.stability_steps)
    if several and options.output is not None:
        print(write_report(load_runs(options.runs), options.output, options.evaluations))
    elif not several:
        runs = [load_run(folder) for folder in stage_folders(options.runs[0]) or options.runs]
        if len(runs) > 1:
            runs.append(join_stages(runs, options.runs[0]))
        for run in runs:
            print(f"{headline(run)}\n{write_report([run], run.folder / 'report.html', options.evaluations)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
