"""Train a few steps as rank 0 of many, over torch's fake process group, and print what they cost this rank.

    python -m tests.run.many_ranks WORLD_SIZE FLAG...

The other ranks do not exist: a collective returns what this rank gave. JSON: `start` and `steps`, each with the
collectives as [name, bytes of this rank's tensors], and the steps with the host memory that Python and numpy allocate.
"""

import json
import os
import sys
import tracemalloc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM_UP = 2


class Collectives(TorchDispatchMode):
    """Lists the collectives that are called inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls.append((func._opname, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def main(world_size: int, flags: list[str]) -> dict[str, Any]:
    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    torch.set_num_threads(1)
    from megatron_ext.config.arguments import parse
    from megatron_ext.run.build import build, describe_run
    from megatron_ext.run.signals import StopRequest
    from megatron_ext.run.trainer import Trainer

    config = parse(flags)
    steps: list[dict[str, Any]] = []
    with StopRequest(None) as request:
        with Collectives() as start:
            built = build(config)
            trainer = Trainer(config, built, describe_run(config, built), request)
        for _ in range(config.training.train_iters):
            with Collectives() as collectives:
                tracemalloc.start()
                batches = trainer.make_batches(trainer.step)
                trainer.launch(batches, waiting_since=0.0)
                trainer.collect_results()
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            steps.append({"collectives": collectives.calls, "peak_bytes": peak})
    return {"start": start.calls, "steps": steps[WARM_UP:]}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
