"""The trainer with slow layers: each takes 0.5 s in the forward pass, and 0.5 s in the backward pass."""

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.attention.interface import AttentionCall
from pretrain_skyladder import main as pretrain

SECONDS = 0.5


def wait(gradient: torch.Tensor) -> None:
    time.sleep(SECONDS)


def main(argv: list[str]) -> int:
    run = AttentionCall.run

    def slow_run(*args: Any, **options: Any) -> torch.Tensor:
        time.sleep(SECONDS)
        out = run(*args, **options)
        out.register_hook(wait)
        return out

    AttentionCall.run = slow_run  # type: ignore[method-assign]
    return int(pretrain(argv))
