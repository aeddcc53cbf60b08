"""The trainer with gradient buckets so small that even the tests' models have many, as real models do."""

import faulthandler
import functools

import pretrain_skyladder
from megatron_ext.engine import optimizer

BUCKET = 900  # elements; Megatron-Core's own least is 40 million

optimizer.DistributedDataParallelConfig = functools.partial(  # type: ignore[assignment, misc]
    optimizer.DistributedDataParallelConfig, bucket_size=BUCKET
)


def main(argv: list[str]) -> int:
    """The trainer's; a process that dies of a signal says where."""
    faulthandler.enable()
    return pretrain_skyladder.main(argv)
