#!/usr/bin/env python
"""Do a step of a run once more, from the newest checkpoint before it: what its rows, documents and layers did.

python tools/replay_step.py RUN STEP
torchrun --nproc-per-node 4 tools/replay_step.py RUN STEP --output replay    the layout of the run: equal to 1e-6
python tools/replay_step.py RUN STEP --tensor-model-parallel-size 1          or another one: its flags work here

RUN/incidents lists the steps that a run kept as loss spikes or numbers that are not finite; any other step that it has
recorded can be replayed too. Steps are counted from 0. Exit status 0: the recorded numbers came out; 1: they did not.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.cli import Parser, command
from megatron_ext.config.arguments import parse
from megatron_ext.config.validation import check
from megatron_ext.errors import UserError
from megatron_ext.launch import is_first, read_launch

if TYPE_CHECKING:  # importing Megatron takes seconds
    from megatron_ext.run.replay import Passage, Replay


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="what training got as --save; of stages, one's folder")
    parser.add_argument("step", type=int, metavar="STEP", help="counted from 0, as in metrics.jsonl")
    parser.add_argument("--most", type=int, default=5, metavar="N", help="rows and documents to name [5]")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write replay.json and losses.npz, by token")
    parser.add_argument(
        "--tolerance", type=float, default=1e-6, metavar="X", help="relative, of the recorded numbers [1e-6]"
    )
    return parser.parse_known_args(argv)


def show(made: Replay, tolerance: float) -> None:
    """Print what came of it."""
    print(f"step {made.step}, window {made.window}, learning rate {made.learning_rate:g}")
    print(f"from {made.checkpoint or 'the first weights of the run'}; recorded in {made.source}")
    for name, value in made.replayed.items():
        before = made.recorded[name]
        print(f"  {name:<12}{value:>14.8g}   recorded {'not finite' if before is None else format(before, '.8g')}")
    outcome = "reproduced" if made.error <= tolerance else "NOT reproduced"
    print(f"{outcome}: largest relative difference {made.error:.1e}, tolerance {tolerance:g}")
    if made.same_rows is not None:
        print("rows: " + ("those of the incident" if made.same_rows else "NOT those of the incident: the data differ"))
    for title, passages in (("rows", made.rows), ("documents", made.documents)):
        print(f"{title} with the largest mean loss:")
        for passage in passages:
            print(f"  {_line(passage)}")
    if made.gradient_norms is None:
        print("gradient norms by part: not told apart under --use-precision-aware-optimizer")
        return
    print("gradient norms:")
    for part, norm in made.gradient_norms.items():
        print(f"  {part:<22}{norm:>12.5g}")


def _line(passage: Passage) -> str:
    begins = repr(passage.text) if passage.text is not None else " ".join(map(str, passage.tokens))
    return (
        f"sample {passage.sample}, tokens {passage.first}..{passage.end - 1}: {passage.loss:.4f} over "
        f"{passage.trained} trained; {begins[:80]}"
    )


@command
def main(argv: list[str]) -> int:
    first = is_first(os.environ)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options, flags = parse_options(argv)
    if options.most < 0:
        raise UserError(f"most: got {options.most}, needs 0 or more rows and documents to name")
    written = options.run / "config.yaml"
    if not written.is_file():
        raise UserError(f"{written}: not found, needs the folder of a run; give what training got as --save")
    config = parse(["--config", str(written), *flags])

    from megatron_ext.run.replay import configuration, replay

    config, _ = configuration(options.run, options.step, config)
    check(config, read_launch(os.environ).world_size)
    made = replay(options.run, options.step, config, most=options.most, output=options.output)
    if first:
        show(made, options.tolerance)
    return 0 if made.error <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
