"""Save the random states of every process as tensors, and restore them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_ext.checkpoint.tensors import Shard
from megatron_ext.engine.parallel import Ranks

_TRACKER = "tracker."


def current() -> dict[str, Tensor]:
    """Return a copy of each generator's state, uint8 [bytes]."""
    states = {_TRACKER + name: state for name, state in get_cuda_rng_tracker().get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.cpu().clone() for name, state in states.items()}


def shards(states: Mapping[str, Tensor], ranks: Ranks) -> list[Shard]:
    """Return the states as shards of a checkpoint, with one row for each process."""
    return [
        Shard.of(f"random_states.{name}", state.view(1, -1), (ranks.world_size, len(state)), (ranks.world, 0))
        for name, state in states.items()
    ]


def restore(states: Mapping[str, Tensor]) -> None:
    """Set the state of every generator of this process."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracker = {name.removeprefix(_TRACKER): state for name, state in states.items() if name.startswith(_TRACKER)}
    get_cuda_rng_tracker().set_states(tracker)
