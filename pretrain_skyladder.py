#!/usr/bin/env python
"""Pretrain a long-context language model: python pretrain_skyladder.py --config FILE [--flag value ...]"""

import logging
import sys

from megatron_ext.cli import FAILED, command, print_traceback
from megatron_ext.config.arguments import parse_dry_run, parse_stages
from megatron_ext.config.checks import check_stages
from megatron_ext.errors import DISK_FULL, UserError
from megatron_ext.launch import is_first, read_launch


@command
def main(argv: list[str]) -> int:
    """Parse flags and YAML into a configuration and train it; return the exit status of run/signals.py."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("megatron_ext").setLevel(logging.INFO if is_first() else logging.WARNING)
    dry, world_size = parse_dry_run(argv)
    stages = parse_stages(argv)
    processes = world_size or read_launch().world_size
    check_stages(stages, processes)
    if dry is not None:
        from megatron_ext.run.dry_run import dry_run  # importing torch takes seconds

        dry_run(stages, processes, strict=dry == "strict")
        return 0

    from megatron_ext.run.stages import train_stages  # importing Megatron takes seconds

    try:
        return train_stages(stages)
    except UserError as error:
        error.of_this_process = not error.is_agreed  # other nodes may have the missing input
        raise
    except OSError as error:  # during training, such as a file that vanished: a restart may help
        if error.errno in DISK_FULL:
            raise
        print_traceback(error)
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
