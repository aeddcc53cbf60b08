"""The programs of this project by name: scripts in a checkout, console commands of an installed package."""

from __future__ import annotations

import sys
from pathlib import Path

PREFIX = "megatron-ext-"
# a command's name after the prefix, and the module whose main(argv) it calls
COMMANDS = {
    "pretrain": "pretrain_skyladder",
    "launch": "tools.launch",
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
    "report": "tools.report",
    "replay": "tools.replay_step",
    "checkpoints": "tools.checkpoints",
    "convert": "tools.convert_checkpoint",
    "generate": "tools.generate",
    "evaluate": "tools.evaluate",
    "environment": "tools.environment",
}


def program(name: str) -> str:
    """Spell how a user starts another program, as this one was started.

        report    python tools/report.py    megatron-ext-report

    Args:
        name: a command's, of `COMMANDS`.
    """
    script = COMMANDS[name].replace(".", "/") + ".py"
    return PREFIX + name if Path(sys.argv[0]).name.startswith(PREFIX) else f"python {script}"
