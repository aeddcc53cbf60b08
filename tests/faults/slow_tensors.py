"""The trainer with a slow disk: a tensor of a checkpoint takes rank 0 0.1 s to write, every rank 0.1 s to read."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.checkpoint import tensors
from pretrain_skyladder import main as pretrain

SECONDS = 0.1


def slow(function: Callable[..., Any], ranks: Sequence[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] in ranks:
            time.sleep(SECONDS)
        return function(*args, **options)

    return call


def main(argv: list[str]) -> int:
    tensors.Stored._load = slow(tensors.Stored._load, "01")  # type: ignore[method-assign]
    tensors._bytes_of = slow(tensors._bytes_of, "0")
    return int(pretrain(argv))
