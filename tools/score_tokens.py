"""Score a run's rows with a frozen model: computes the short-context losses for --token-weighting frozen.

python tools/score_tokens.py --checkpoint MODEL --context 8192 --stride 6144 --output scores.zarr --config run.yaml

All other flags are the trainer's: pass the flags of the run that will read the store (--config, --data-path, ...).
Run it under torchrun for several processes, or several times at once with --part 0/N ... N-1/N on one store. It can be
killed and resumed at any time.
"""

import logging
import sys
from pathlib import Path

from megatron_ext.cli import Parser, command, positive
from megatron_ext.config.arguments import parse
from megatron_ext.errors import UserError
from megatron_ext.launch import is_first, read_launch


@command
def main(argv: list[str]) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, metavar="FOLDER", help="Hugging Face model, run or checkpoint")
    add("--output", required=True, type=Path, metavar="STORE", help="zarr store; made, or continued")
    add("--context", required=True, type=positive, metavar="N", help="n, tokens of a chunk")
    add("--stride", type=positive, metavar="S", help="s, tokens that a chunk scores (default 3n/4)")
    add("--rows", type=positive, help="samples to score, from --first-sample on (default: all that the run takes)")
    add("--part", default="0/1", metavar="I/N", help="of N commands on one store, this is number I, from 0")
    options, flags = parser.parse_known_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    first = is_first()
    logging.getLogger("megatron_ext").setLevel(logging.INFO if first else logging.WARNING)
    read_launch()
    config = parse(flags)
    stride = options.stride if options.stride is not None else max(options.context * 3 // 4, 1)
    if not 1 <= stride <= options.context <= config.data.seq_length:
        raise UserError(
            f"context, stride: got {options.context}, {stride}, needs 1 <= stride <= context <= seq_length "
            f"{config.data.seq_length}"
        )
    number, _, parts = options.part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise UserError(f"part: got {options.part!r}, needs I/N with 0 <= I < N, such as 0/4")
    end = config.samples if options.rows is None else config.data.first_sample + options.rows
    from megatron_ext.checkpoint.pretrained import Pretrained  # importing Megatron takes seconds
    from megatron_ext.run.identity import checked_vocab_size
    from megatron_ext.run.scoring import score_rows
    from megatron_ext.short_context import ShortContext

    scorer = Pretrained.find(options.checkpoint)
    short = ShortContext(options.context, stride, every_token=True)
    part = slice(int(number), None, int(parts))
    score_rows(config, checked_vocab_size(config), scorer, short, end, options.output, part)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
