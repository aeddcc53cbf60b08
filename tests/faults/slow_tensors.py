"""The trainer with a slow disk: a tensor of a checkpoint takes rank 0 0.1 s to write, every rank 0.1 s to read."""

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.checkpoint import tensors
from pretrain_skyladder import main as pretrain

SECONDS = 0.1


def slow(function: Callable[..., Any], rank: str | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if rank in (None, os.environ.get("RANK")):
            time.sleep(SECONDS)
        return function(*args, **options)

    return call


def main(argv: list[str]) -> int:
    load: Any = slow(tensors.Stored._load, None)
    tensors.Stored._load, tensors._bytes_of = load, slow(tensors._bytes_of, "0")  # type: ignore[method-assign]
    return int(pretrain(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
