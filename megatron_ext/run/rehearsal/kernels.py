"""Compute the cost of attention kernels: FLOPs from the (query, key) pairs of their segments, and scratch memory.

The pairs come from the attention call's layout on the host (`AttentionCall`).

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

Pairs = Callable[[Tensor], int]  # the pairs of a call, by its tensor of borders or of first keys


@dataclass(frozen=True)
class Cost:
    """FLOPs of one call of a kernel, and its temporary memory in bytes."""

    flops: int
    scratch: int = 0


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


def _varlen(products: int, backward: bool) -> Callable[[Pairs, Mapping[str, Any]], Cost]:
    """Return the cost of (query, key, value, cu_seq_q, cu_seq_k, ...): `products` matrix products over all pairs."""

    def cost(pairs: Pairs, args: Mapping[str, Any]) -> Cost:
        query, key = args["query"], args["key"]
        (t, heads, size), (u, key_heads, _) = query.shape, key.shape
        flops = 2 * products * pairs(args["cu_seq_q"]) * heads * size
        if not backward:
            return Cost(flops)
        segments = len(args["cu_seq_q"]) - 1
        return Cost(flops, flash_backward_scratch(t, u, segments, heads, key_heads, size, query.element_size()))

    return cost


def _packed(products: int, backward: bool) -> Callable[[Pairs, Mapping[str, Any]], Cost]:
    """Return the cost of (query, key, value, low_t, high_t, ...): `products` matrix products over each query's keys."""

    def cost(pairs: Pairs, args: Mapping[str, Any]) -> Cost:
        t, heads, size = args["query"].shape
        flops = 2 * products * pairs(args["low_t"]) * heads * size
        return Cost(flops, packed_backward_scratch(t, heads) if backward else 0)

    return cost


def _no_products(pairs: Pairs, args: Mapping[str, Any]) -> Cost:
    """Return zero FLOPs: one pass over the logits."""
    return Cost(0)


# operator -> cost of a call with these arguments, by name. Backward of flash attention recomputes the scores and
# computes the gradients of values, probabilities, queries and keys; our kernels compute the scores and their gradients
# twice.
KERNELS: dict[str, Callable[[Pairs, Mapping[str, Any]], Cost]] = {
    "torch_attn::_varlen_attn": _varlen(2, backward=False),
    "torch_attn::_varlen_attn_backward": _varlen(5, backward=True),
    "megatron_ext::packed_attention": _packed(2, backward=False),
    "megatron_ext::packed_attention_backward": _packed(7, backward=True),
    "megatron_ext::softmax_statistics": _no_products,
    "megatron_ext::softmax_gradient": _no_products,
}
