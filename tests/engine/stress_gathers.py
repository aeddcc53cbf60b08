"""Many all-gathers in flight in two gloo processes: python tests/engine/stress_gathers.py joined|one_by_one

`joined` is torch's own way; with torch 2.13 a run now and then ends in SIGSEGV or SIGABRT. Exit status 0: it did not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BUCKETS, ROUNDS = 300, 100


def stress(rank: int, way: str) -> bool:
    """Whether every bucket of every round is right."""
    from megatron_ext.engine.compat import one_by_one

    manager = {"joined": dist._coalescing_manager, "one_by_one": one_by_one}[way]
    group = dist.group.WORLD
    buckets = [torch.zeros(2 * (8 + 37 * bucket % 101)) for bucket in range(BUCKETS)]
    right = True
    for round_ in range(ROUNDS):
        handles = []
        for number, bucket in enumerate(buckets):
            bucket.fill_(-1).chunk(2)[rank].fill_(round_ + number + rank)
            with manager(group, async_ops=True) as handle:
                dist.all_gather_into_tensor(bucket, bucket.chunk(2)[rank], group=group, async_op=True)
            handles.append(handle)
        for handle in handles:
            handle.wait()
        for number, bucket in enumerate(buckets):
            right &= all(bool((bucket.chunk(2)[one] == round_ + number + one).all()) for one in (0, 1))
    return right


if __name__ == "__main__":
    import stress_gathers  # under its own name, which other processes know
    from launcher import call

    sys.exit(0 if all(call(stress_gathers.stress, 2, sys.argv[1], timeout_s=300)) else 1)
