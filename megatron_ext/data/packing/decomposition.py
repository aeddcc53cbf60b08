"""Dataset Decomposition (arXiv 2405.13226): buckets of rows of 2^i tokens, and which of them a step draws from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.data.dataset import TokenSource, nonempty
from megatron_ext.data.packing.plan import Int64, PackingPlan, PackingPolicy
from megatron_ext.data.packing.policies import DEFAULT_OPTIONS, Options, build_plan, plan_key
from megatron_ext.errors import UserError


def build_buckets(
    source: TokenSource, documents: Sequence[int] | Int64, seed: int, options: Options | None = None
) -> list[PackingPlan]:
    """A plan for each power of two from `shortest` to `longest` of which there is a piece, in rising order.

    Raises:
        UserError: as `build_plan`; no document has `shortest` tokens.
    """
    policy = PackingPolicy.DECOMPOSITION.value
    longest = int((options or {}).get("longest", DEFAULT_OPTIONS[PackingPolicy.DECOMPOSITION]["longest"]))
    shortest = int(plan_key(policy, source, documents, longest, seed, options).options["shortest"])
    _, lengths = nonempty(source, documents)
    plans = []
    for power in range(shortest.bit_length() - 1, longest.bit_length()):
        row_length = 2**power
        if (lengths >= longest if row_length == longest else lengths & row_length).any():
            plans.append(build_plan(policy, source, documents, row_length, seed, options))
    if not plans:
        raise UserError(f"packing: decomposition: no document has {shortest} tokens; give a smaller shortest")
    return plans


@dataclass(frozen=True)
class BucketBatch:
    """One global batch: samples first_sample, first_sample + 1, ... (`rows` of them) of bucket number `bucket`."""

    bucket: int
    first_sample: int
    rows: int


class BucketSchedule:
    """The bucket of each step: in every epoch `cycles` times from the shortest rows to the longest.

    Each batch has the same number of tokens. An epoch has as many whole batches of a bucket as its rows fill, shared
    out evenly over the cycles; the rows that are left over begin the bucket's next epoch, so none is lost.

        row lengths 2, 4;  8 and 4 rows;  8 tokens a batch;  2 cycles     ->     buckets 0 1 0 1
                                                             1 cycle      ->             0 0 1 1

    Args:
        row_lengths, row_counts: of each bucket, in rising order of the length.
        tokens_per_batch: a multiple of every row length.
        cycles: c >= 1.

    Raises:
        UserError: no cycle, tokens that no whole number of rows makes, no bucket with a whole batch.
    """

    def __init__(
        self, row_lengths: Sequence[int], row_counts: Sequence[int], tokens_per_batch: int, cycles: int = 1
    ) -> None:
        assert len(row_lengths) == len(row_counts)
        assert list(row_lengths) == sorted(row_lengths)
        if cycles < 1:
            raise UserError(f"packing: cycles is {cycles}; needs at least 1")
        for length in row_lengths:
            if tokens_per_batch < 1 or tokens_per_batch % length:
                raise UserError(
                    f"packing: a batch of {tokens_per_batch} tokens is no whole number of rows of {length}; "
                    "use a global batch that is a multiple of the longest row"
                )
        self.rows_per_batch = tuple(tokens_per_batch // length for length in row_lengths)
        self._batches = np.array(row_counts, dtype=np.int64) // self.rows_per_batch  # of each bucket, an epoch
        if not self._batches.any():
            raise UserError(f"packing: no bucket fills a batch of {tokens_per_batch} tokens; use a smaller one")
        shares = np.diff([cycle * self._batches // cycles for cycle in range(cycles + 1)], axis=0)  # [cycles, buckets]
        self._buckets = np.repeat(np.tile(np.arange(len(row_lengths)), cycles), shares.reshape(-1))
        self._before = np.empty_like(self._buckets)  # batches of the same bucket earlier in the epoch
        for bucket, count in enumerate(self._batches):
            self._before[self._buckets == bucket] = np.arange(count)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of all buckets."""
        return len(self._buckets)

    def batch(self, step: int) -> BucketBatch:
        """The batch of step 0, 1, 2, ..."""
        epoch, place = divmod(step, self.steps_per_epoch)
        bucket = int(self._buckets[place])
        batches = epoch * int(self._batches[bucket]) + int(self._before[place])
        return BucketBatch(bucket, batches * self.rows_per_batch[bucket], self.rows_per_batch[bucket])
