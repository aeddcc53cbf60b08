"""Compute the cost of attention kernels: FLOPs from the (query, key) pairs of their segments, and scratch memory.

Legend: S segments, t queries, u keys, N query heads, G key heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_ext.planning.memory import flash_backward_scratch, packed_backward_scratch

Values = Callable[[Tensor], npt.NDArray[Any]]  # of a tensor of borders, which the meter knows


@dataclass(frozen=True)
class Kernel:
    """The cost of a custom operator, given its arguments by name.

    Attributes:
        products: matrix products over all (query, key) pairs.
        pairs: counts them.
        scratch: returns the bytes that a call allocates and frees.
    """

    products: int = 0
    pairs: Callable[[Values, Mapping[str, Any]], int] = lambda values, args: 0
    scratch: Callable[[Mapping[str, Any]], int] = lambda args: 0

    def flops(self, values: Values, args: Mapping[str, Any]) -> int:
        """Return the FLOPs of a call."""
        if self.products == 0:
            return 0
        _, heads, size = args["query"].shape
        return int(2 * self.products * self.pairs(values, args) * heads * size)


def segment_pairs(borders_q: npt.NDArray[Any], borders_kv: npt.NDArray[Any], left: int) -> int:
    """Count the (query, key) pairs of causal segments aligned at the bottom right.

    Args:
        borders_q, borders_kv: [S+1], of the segments' queries and keys.
        left: maximum number of keys before itself that a query sees; -1 for all.
    """
    wide_q, wide_kv = borders_q.astype(np.int64), borders_kv.astype(np.int64)
    queries, keys = wide_q[1:] - wide_q[:-1], wide_kv[1:] - wide_kv[:-1]
    # query j of q sees the keys up to j + k - q: j + k - q + 1 of them, from k - q + 1 for the first to k for the last
    every = queries * (keys - queries) + queries * (queries + 1) // 2
    if left < 0:
        return int(every.sum())
    beyond = np.minimum(np.maximum(keys - left - 1, 0), queries)  # queries whose window ends before the first key
    most = keys - left - 1  # additional keys of the last of them
    return int((every - beyond * most + beyond * (beyond - 1) // 2).sum())


def _varlen_pairs(values: Values, args: Mapping[str, Any]) -> int:
    return segment_pairs(values(args["cu_seq_q"]), values(args["cu_seq_k"]), args["window_size"][0])


def _packed_pairs(values: Values, args: Mapping[str, Any]) -> int:
    first, last = (values(args[name]).astype(np.int64) for name in ("low_t", "high_t"))
    return int((last - first + 1).sum())


def _varlen_scratch(args: Mapping[str, Any]) -> int:
    query, key, segments = args["query"], args["key"], len(args["cu_seq_q"]) - 1
    (t, heads, size), (u, key_heads, _) = query.shape, key.shape
    return flash_backward_scratch(t, u, segments, heads, key_heads, size, query.element_size())


def _packed_scratch(args: Mapping[str, Any]) -> int:
    t, heads, _ = args["query"].shape
    return packed_backward_scratch(t, heads)


# backward of flash attention recomputes the scores and computes the gradients of values, probabilities, queries and
# keys; our kernels compute the scores and their gradients twice
KERNELS = {
    "torch_attn::_varlen_attn": Kernel(2, _varlen_pairs),
    "torch_attn::_varlen_attn_backward": Kernel(5, _varlen_pairs, _varlen_scratch),
    "megatron_ext::packed_attention": Kernel(2, _packed_pairs),
    "megatron_ext::packed_attention_backward": Kernel(7, _packed_pairs, _packed_scratch),
    "megatron_ext::softmax_statistics": Kernel(),  # one pass over the logits
    "megatron_ext::softmax_gradient": Kernel(),
}
