"""The process group that shares the tokens of a row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class CPGroup:
    """The ranks that share the tokens of a row."""

    rank: int
    size: int
    group: dist.ProcessGroup | None  # None if the size is 1
    parts: int = 1  # key heads are exchanged in up to this many parts, to overlap with attention
    sent_bytes: int = 0  # by this process, since `take_sent_bytes` was last called

    def take_sent_bytes(self) -> int:
        sent = self.sent_bytes
        self.sent_bytes = 0
        return sent

    def gather(self, values_t: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather the values of all ranks in rank order; rank r has counts[r]. Not differentiable."""
        if self.size == 1:
            return values_t
        longest = max(counts)  # all_gather needs equal shapes
        padded = values_t.new_zeros(longest)
        padded[: len(values_t)] = values_t
        by_rank = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(by_rank, padded, group=self.group)
        self.sent_bytes += (self.size - 1) * padded.nbytes
        return torch.cat([values[:count] for values, count in zip(by_rank, counts, strict=True)])
