#!/usr/bin/env python
"""Pretrain a long-context language model: python pretrain_skyladder.py --config FILE [--flag value ...]"""

from __future__ import annotations

import logging
import os
import sys

from megatron_ext.command_line import FAULT, FaultError, command
from megatron_ext.config.arguments import parse_dry_run, parse_stages
from megatron_ext.config.validation import check_stages
from megatron_ext.errors import UserError, first_line
from megatron_ext.launch import is_first, leave_to_torchrun, read_launch, world_size


@command
def main(argv: list[str]) -> int:
    """Turn flags and YAML into a configuration and train it; return the exit status of run/signals.py."""
    first = is_first(os.environ)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("megatron_ext").setLevel(logging.INFO if first else logging.WARNING)
    dry = parse_dry_run(argv)
    stages = parse_stages(argv)
    processes = (
        read_launch(os.environ).world_size
        if dry is None
        else dry.world_size or world_size(os.environ)  # which needs no place where processes meet
    )
    check_stages(stages, processes)

    if dry is not None:
        from megatron_ext.run.dry_run import dry_run  # importing torch takes seconds

        dry_run(stages, processes, strict=dry.strict)
        return 0

    from megatron_ext.run.stages import train_stages  # importing Megatron takes seconds
    from megatron_ext.run.watchdog import LostRankError

    try:
        return train_stages(stages)
    except UserError as error:
        error.of_this_process = True  # another node may have what this one lacks
        raise
    except Exception as error:  # of the system too: a disk that was away for a moment is a crash, not bad input
        if isinstance(error, LostRankError) and error.said:
            leave_to_torchrun(first_line(error))
            return FAULT
        run = stages[0].run
        raise FaultError(None if run is None else run / "faults") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
