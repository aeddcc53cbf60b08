#!/usr/bin/env python
"""Print the text and the losses of the rows of a step, for example to find the documents of a loss spike.

python tools/inspect_step.py RUN STEP

Steps are counted from 0, as in metrics.jsonl. Rows are recomputed from the seed and the sample index, with the options
in effect at the step; losses are computed with the newest checkpoint before the step. It runs on one process, whatever
the run's layout.
"""

import logging
import sys
from pathlib import Path

from megatron_ext.cli import Parser, command
from megatron_ext.config.arguments import parse
from megatron_ext.errors import UserError


@command
def main(argv: list[str]) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="what training got as --save; of stages, one's folder")
    parser.add_argument("step", type=int, metavar="STEP", help="counted from 0, as in metrics.jsonl")
    parser.add_argument("--characters", type=int, default=100, metavar="N", help="of each document's text [100]")
    options = parser.parse_args(argv)
    written = options.run / "config.yaml"
    if not written.is_file():
        raise UserError(f"{written}: not found, needs the folder of a run; give what training got as --save")
    config = parse(["--config", str(written)])

    from megatron_ext.run.inspect_step import inspect_step  # importing Megatron takes seconds

    for line in inspect_step(options.run, options.step, config, options.characters):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
