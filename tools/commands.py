"""The console commands of an installed package: megatron-ext-evaluate is what tools/evaluate.py is in a checkout."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

PREFIX = "megatron-ext-"
# a command's name after the prefix, and the module whose main(argv) it calls
COMMANDS = {
    "pretrain": "pretrain_skyladder",
    "preprocess": "tools.preprocess_data",
    "train-tokenizer": "tools.train_tokenizer",
    "gather-corpus": "tools.gather_corpus",
    "pack": "tools.pack_data",
    "inspect-pack": "tools.inspect_pack",
    "score": "tools.score_tokens",
    "recipes": "tools.recipes",
    "twin": "tools.twin_recipe",
    "plan": "tools.plan_run",
    "rehearse": "tools.rehearse",
    "simulate": "tools.simulate_run",
    "report": "tools.report",
    "replay": "tools.replay_step",
    "checkpoints": "tools.checkpoints",
    "convert": "tools.convert_checkpoint",
    "generate": "tools.generate",
    "evaluate": "tools.evaluate",
    "environment": "tools.environment",
}


def main() -> int:
    """Do what the command does by whose name this process was started."""
    name = Path(sys.argv[0]).name.removeprefix(PREFIX)
    if name not in COMMANDS:
        print(f"{sys.argv[0]}: no command of megatron_ext; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = COMMANDS[name]
    status: int = import_module(f"megatron_ext.{module}" if "." in module else module).main(sys.argv[1:])
    return status
