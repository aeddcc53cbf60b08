#!/usr/bin/env python
"""Pretrain a long-context language model: python pretrain_skyladder.py --config FILE [--flag value ...]"""

from __future__ import annotations

import logging
import os
import sys

from megatron_ext.config.arguments import parse_dry_run, parse_stages
from megatron_ext.config.validation import check_stages
from megatron_ext.errors import UserError
from megatron_ext.launch import LaunchError, is_first, read_launch, world_size


def main(argv: list[str]) -> int:
    """Turn flags and YAML into a configuration and train it; return the exit status of run/signals.py."""
    first = is_first(os.environ)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("megatron_ext").setLevel(logging.INFO if first else logging.WARNING)
    try:
        dry = parse_dry_run(argv)
        stages = parse_stages(argv)
        processes = (
            read_launch(os.environ).world_size
            if dry is None
            else dry.world_size or world_size(os.environ)  # which needs no place where processes meet
        )
        check_stages(stages, processes)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2
    except UserError as error:
        if first:  # the others say the same
            print(error, file=sys.stderr)
        return 2

    if dry is not None:
        from megatron_ext.run.dry_run import dry_run  # importing torch takes seconds

        return dry_run(stages, processes, strict=dry.strict)

    from megatron_ext.run.stages import train_stages  # importing Megatron takes seconds

    try:
        return train_stages(stages)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
