"""A key-value cache for generation.

A call appends tokens to several texts, whether whole prompts or single new tokens; each query sees the keys of its own
text. In this example the first text has 3 tokens in the cache and gets its fourth, and the second starts with 2:

    cache, capacity 5     a a a a . | b b . . .
    read for the call     a a a a b b                  cu_seqlens_kv = [0, 4, 6]
    queries                     a b b                  cu_seqlens_q  = [0, 1, 3]
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.arrays import Int64, ranges
from megatron_ext.attention.interface import AttentionCall


class KeyValueCache:
    """Stores the keys and values of every layer for up to `slots` texts of up to `capacity` tokens."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = np.zeros(slots, dtype=np.int64)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer, slots * capacity rows each

    def keep(self, slot: int, tokens: int) -> None:
        """Truncate a slot to its first tokens."""
        assert tokens <= self.lengths[slot], (tokens, self.lengths[slot])
        self.lengths[slot] = tokens

    def append(self, slots: Sequence[int], counts: Sequence[int]) -> "Appended":
        """Reserve rows for new tokens of the texts in `slots` (no repeats), at least one for each.

        Return these rows and the rows of the keys that they see.
        """
        where = np.asarray(slots, dtype=np.int64)
        new = np.asarray(counts, dtype=np.int64)
        before = self.lengths[where]
        after = before + new
        assert after.max() <= self.capacity, (after, self.capacity)
        self.lengths[where] = after
        first = where * self.capacity
        return Appended(
            cache=self,
            positions=ranges(before, new),
            write=torch.from_numpy(ranges(first + before, new)),
            read=torch.from_numpy(ranges(first, after)),
            cu_seqlens_q=np.append(0, np.cumsum(new)),
            cu_seqlens_kv=np.append(0, np.cumsum(after)),
        )


@dataclass(frozen=True, eq=False)
class Appended:
    """The cache rows of one call's tokens."""

    cache: KeyValueCache
    positions: Int64  # int64 [t], the position of each new token within its text
    write: Tensor  # int64 [t], the cache rows of their keys and values
    read: Tensor  # int64 [u], the cache rows that the call reads, text by text
    # cu_seqlens_q, cu_seqlens_kv: the borders of the texts in the queries and in the rows read
    cu_seqlens_q: Int64
    cu_seqlens_kv: Int64

    def call(self, left_window: int | None) -> AttentionCall:
        """Return the attention call, with a sliding window of `left_window` tokens or None."""
        return AttentionCall.of(self.cu_seqlens_q.astype(np.int32), self.cu_seqlens_kv.astype(np.int32), left_window)

    def extend(self, layer_number: int, key_tGH: Tensor, value_tGW: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all that the call sees, [u, G, H] and [u, G, W]."""
        if layer_number not in self.cache.layers:
            rows = len(self.cache.lengths) * self.cache.capacity
            keys, values = (x.new_empty(rows, *x.shape[1:]) for x in (key_tGH, value_tGW))
            self.cache.layers[layer_number] = keys, values
        keys, values = self.cache.layers[layer_number]
        keys[self.write] = key_tGH
        values[self.write] = value_tGW
        return keys[self.read], values[self.read]
