"""What process 0 alone meets beside a checkpoint is every process's refusal: none waits for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from launcher import call

from megatron_ext.config import Config, DataConfig
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
