"""The console commands of an installed package: megatron-ext-evaluate is what tools/evaluate.py is in a checkout."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from megatron_ext.programs import COMMANDS, PREFIX


def main() -> int:
    """Do what the command does by whose name this process was started."""
    name = Path(sys.argv[0]).name.removeprefix(PREFIX)
    if name not in COMMANDS:
        print(f"{sys.argv[0]}: no command of megatron_ext; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = COMMANDS[name]
    status: int = import_module(f"megatron_ext.{module}" if "." in module else module).main(sys.argv[1:])
    return status
