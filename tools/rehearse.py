#!/usr/bin/env python
"""Rehearse a run on this machine's CPU: any rank of any number of GPUs, one real step per window, without a GPU.

python tools/rehearse.py --config examples/configs/prolong/prolong_8b.yaml --stage 512k --world-size 64
    --ranks 0,7,63 --windows 32,8192,full

Any flag of pretrain_skyladder.py may follow. See docs/planning.md for the measurements.
"""

import json
import sys

from megatron_ext.cli import Parser, command, output_file, positive
from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import check
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write
from megatron_ext.rehearsal.process import Request, describe, in_process


def numbers(field: str, text: str, low: int, high: int, name: str, named: list[int]) -> list[int]:
    """Parse numbers with commas between them; `name` among them stands for the numbers `named`."""
    parsed: list[int] = []
    for word in text.split(","):
        if word == name:
            parsed += named
        elif word.isascii() and word.isdecimal() and low <= int(word) <= high:
            parsed.append(int(word))
        else:
            raise UserError(f"{field}: got {text!r}, needs numbers {low}..{high} with commas between them, or {name}")
    return list(dict.fromkeys(parsed))


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--world-size", type=positive, required=True, help="processes of the run")
    parser.add_argument("--ranks", default="stages", help="0,7,63, or the first of each pipeline stage (default)")
    parser.add_argument("--windows", default="full", help="windows in tokens, 32,8192,full (default: full)")
    parser.add_argument(
        "--documents", choices=("drawn", "whole"), help="rows of drawn documents, or of one each (default: the run's)"
    )
    parser.add_argument("--json", type=output_file(".json"), help="write what was found here too")
    options, training = parser.parse_known_args(argv)
    config = parse(training)
    check(config, options.world_size)
    per_stage = options.world_size // config.parallel.pipeline_model_parallel_size
    stages_first = list(range(0, options.world_size, per_stage))
    ranks = numbers("ranks", options.ranks, 0, options.world_size - 1, "stages", stages_first)
    full = [config.window_schedule().end]
    windows = numbers("windows", options.windows, 1, config.data.seq_length, "full", full)
    results = []
    for rank in ranks:
        result = in_process(Request(training, options.world_size, rank, windows, options.documents))
        results.append(result)
        print("\n".join(describe(result)), flush=True)
    if options.json is not None:
        with atomic_write(options.json) as aside:
            aside.write_text(json.dumps(results, indent=1), encoding="utf-8")
    failed = any(result["fault"] or any(step["fault"] for step in result["steps"]) for result in results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
