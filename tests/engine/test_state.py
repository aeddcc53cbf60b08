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


def told(rank: int, number: int, lost: str | None) -> str:
    """What a process is told where the system gives this error to process 0."""

    def fails() -> None:
        raise OSError(number, os.strerror(number), "runs/a/file")

    ranks: Any = SimpleNamespace(world=rank, world_size=2)
    checkpointer: Any = SimpleNamespace(ranks=ranks, saved=None)
    try:
        if lost is None:
            run_on_rank0(ranks, fails, Path("runs/a"))
        else:
            Checkpointer._on_first(checkpointer, fails, Path("runs/a"), lost)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("lost", [None, "the checkpoint of step 3"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_what_may_pass_by_is_no_refusal(number: int, lost: str | None) -> None:
    """Bad input ends a job for good; after a crash it is started again."""
    first, second = call(told, 2, number, lost)
    said = f"[Errno {number}] {os.strerror(number)}: 'runs/a/file'"
    assert first == f"{'TimeoutError' if number == errno.ETIMEDOUT else 'OSError'}: {said}"
    assert second.startswith("RuntimeError: process 0: ")
    assert os.strerror(number) in second


@pytest.mark.parametrize("lost", [None, "the checkpoint of step 3"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EEXIST])
def test_what_stays_is_a_refusal(number: int, lost: str | None) -> None:
    for said in call(told, 2, number, lost):
        assert said.startswith(f"UserError: save: runs/a/file cannot be written ({os.strerror(number)})")


def after_an_exit(rank: int) -> str:
    """What becomes of a process where rank 0 is interrupted inside the action."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    ranks: Any = SimpleNamespace(world=rank, world_size=2)
    try:
        return f"goes on with {run_on_rank0(ranks, interrupted, Path('runs/a'))}"
    except BaseException as error:
        return type(error).__name__


def test_the_other_ranks_do_not_go_on_after_an_interrupt_on_rank_0() -> None:
    assert call(after_an_exit, 2) == ["KeyboardInterrupt", "RuntimeError"]
