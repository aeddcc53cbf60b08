#!/usr/bin/env python
"""Pretrain a long-context language model: python pretrain_skyladder.py --config FILE [--flag value ...]"""

from __future__ import annotations

import logging
import os
import sys

from megatron_ext.arguments import parse
from megatron_ext.errors import UserError
from megatron_ext.validation import check


def main(argv: list[str]) -> int:
    """Flags and YAML -> configuration -> training; 2 for bad input, said in one line per mistake."""
    first = int(os.environ.get("RANK", 0)) == 0
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("megatron_ext").setLevel(logging.INFO if first else logging.WARNING)
    try:
        config = parse(argv)
        check(config, int(os.environ.get("WORLD_SIZE", 1)))
    except UserError as error:
        if first:  # the others found the same
            print(error, file=sys.stderr)
        return 2

    from megatron_ext.engine.train import train  # importing Megatron takes seconds

    try:
        train(config)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
