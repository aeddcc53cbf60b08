"""What process 0 alone meets beside a checkpoint is every process's refusal: none waits for another."""

import errno
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launcher import call

from megatron_ext.checkpoint.tensors import Shard
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

    try:
        run_on_rank0(fails, Path("runs/a"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_only_a_lasting_error_is_a_user_error() -> None:
    """A user error ends a job for good; after a crash it is started again."""
    for text in call(error_of, 2, errno.ENOSPC):
        assert text.startswith("UserError: save: runs/a/file cannot be written (No space left on device)")
    first, second = call(error_of, 2, errno.EIO)
    assert first == "OSError: [Errno 5] Input/output error: 'runs/a/file'"
    assert second.startswith("RuntimeError: another process has failed: ")


def test_copies_of_an_async_save_are_pinned_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one allocation that is used again: torch's own pinned ones are rounded up to powers of two."""
    pinned: dict[int, int] = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.update({address: size}) or 0,
        cudaHostUnregister=lambda address: pinned.pop(address) and 0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: error == 0 or pytest.fail(str(error)))
    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._copies, checkpointer._unpin = [], lambda: None
    tensors = [
        torch.arange(33.0).view(3, 11),
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor(7, dtype=torch.uint8),
    ]
    tensors += [torch.empty(0, 4)]
    shards = [Shard.of(f"x{i}", x, tuple(x.shape), (0,) * x.ndim) for i, x in enumerate(tensors)]
    for step in range(2):
        copies = [shard.data() for shard in checkpointer._copied(shards)]
        assert all(
            torch.equal(x, y) and x.data_ptr() != y.data_ptr() for x, y in zip(copies[:3], tensors, strict=False)
        )
        assert [(copy.shape, copy.dtype) for copy in copies] == [(x.shape, x.dtype) for x in tensors]
        assert list(pinned.items()) == [(copies[0].data_ptr(), 192 + 64 + 64)], step
        tensors[0].add_(1)
    checkpointer._copied(shards[:1])  # others than before
    assert list(pinned.values()) == [192]
    del checkpointer
    gc.collect()
    assert not pinned
