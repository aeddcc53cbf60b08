"""Save the random states of every process as tensors, and restore them: Megatron saves them as pickles."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_ext.engine.parallel import Ranks


def sharded(ranks: Ranks) -> dict[str, ShardedTensor]:
    """Return uint8 [world_size, bytes] for each generator, a row for each process."""
    states = {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        name: ShardedTensor.from_rank_offsets(
            f"random_states.{name}", state.cpu().view(1, -1).clone(), (0, ranks.world, ranks.world_size)
        )
        for name, state in states.items()
    }


def restore(states: dict[str, Tensor]) -> None:
    """Set every generator of this process from what was read in the form of `sharded`."""
    tracker = {name.removeprefix("tracker."): state[0] for name, state in states.items() if name.startswith("tracker.")}
    torch.set_rng_state(states["cpu"][0])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"][0])
    get_cuda_rng_tracker().set_states(tracker)
