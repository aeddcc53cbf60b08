"""What process 0 alone meets beside a checkpoint is every process's refusal: none waits for another."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launcher import call

from megatron_ext.config import Config, DataConfig
from megatron_ext.engine.parallel import run_on_rank0
from megatron_ext.engine.state import Checkpointer
from megatron_ext.errors import UserError


def refusal(rank: int) -> str:
    """What a process is told where the data has gone since the run opened it."""
    alone = dict.fromkeys(("tensor_size", "pipeline_size", "context_size", "expert_size"), 1)
    ranks: Any = SimpleNamespace(world=rank, world_size=2, data_size=2, **alone)
    optimizer: Any = None
    try:
        Checkpointer([], optimizer, Config(data=DataConfig(data_path=("/gone/data",))), ranks)
    except UserError as error:
        return str(error)
    return "no refusal"


def test_data_that_has_gone_is_refused_by_every_process() -> None:
    assert call(refusal, 2) == ["data: /gone/data.idx cannot be read (No such file or directory); check the path"] * 2


def error_of(rank: int, number: int) -> str:
    """The error of a process if the system gives this one to process 0."""

    def fails() -> None:
        raise OSError(number, os.strerror(number), "runs/a/file")

    ranks: Any = SimpleNamespace(world=rank, world_size=2)
    try:
        run_on_rank0(ranks, fails, Path("runs/a"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
def test_a_transient_error_is_no_user_error(number: int) -> None:
    """A user error ends a job for good; after a crash it is started again."""
    first, second = call(error_of, 2, number)
    text = f"[Errno {number}] {os.strerror(number)}: 'runs/a/file'"
    assert first == f"{'TimeoutError' if number == errno.ETIMEDOUT else 'OSError'}: {text}"
    assert second.startswith("RuntimeError: another process has failed: ")
    assert os.strerror(number) in second


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_lasting_error_is_a_user_error(number: int) -> None:
    for text in call(error_of, 2, number):
        assert text.startswith(f"UserError: save: runs/a/file cannot be written ({os.strerror(number)})")
