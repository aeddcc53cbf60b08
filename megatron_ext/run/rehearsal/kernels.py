"""What attention kernels cost that their shapes do not tell: FLOPs by the borders of segments, and scratch memory.

Legend: S segments, t queries, u keys, N query heads, G key heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_ext.planning.attention_memory import flash_backward_scratch, packed_backward_scratch

Borders = npt.NDArray[np.int64]
# gives the values of a small integer tensor on the device, known from what was copied to it; None where they are not
Known = Callable[[Tensor], npt.NDArray[Any] | None]


@dataclass(frozen=True)
class Cost:
    """Holds what one call of a kernel costs: FLOPs, and bytes that it takes for itself meanwhile."""

    flops: int
    scratch: int


def pairs(borders_q: Borders, borders_kv: Borders, left: int) -> int:
    """Count the (query, key) pairs of causal segments aligned at the bottom right.

    Args:
        borders_q, borders_kv: [S+1], of the segments' queries and keys.
        left: keys before itself that a query sees at most; -1 for all.
    """
    wide_q, wide_kv = borders_q.astype(np.int64), borders_kv.astype(np.int64)
    queries, keys = wide_q[1:] - wide_q[:-1], wide_kv[1:] - wide_kv[:-1]
    # query j of q sees the keys up to j + k - q: j + k - q + 1 of them, from k - q + 1 for the first to k for the last
    every = queries * (keys - queries) + queries * (queries + 1) // 2
    if left < 0:
        return int(every.sum())
    beyond = np.minimum(np.maximum(keys - left - 1, 0), queries)  # queries whose window ends before the first key
    most = keys - left - 1  # what the last of them would see more
    return int((every - beyond * most + beyond * (beyond - 1) // 2).sum())


def _varlen(known: Known, args: Mapping[str, Any]) -> Cost:
    """(query, key, value, cu_seq_q, cu_seq_k, ..., window_size): two products over all pairs."""
    return Cost(4 * _work(known, args), 0)


def _varlen_backward(known: Known, args: Mapping[str, Any]) -> Cost:
    """Five products: the scores anew, and the gradients of values, probabilities, queries and keys."""
    query, key = args["query"], args["key"]
    (t, heads, size), (u, key_heads, _) = query.shape, key.shape
    segments = len(args["cu_seq_q"]) - 1
    return Cost(
        10 * _work(known, args), flash_backward_scratch(t, u, segments, heads, key_heads, size, query.element_size())
    )


def _work(known: Known, args: Mapping[str, Any]) -> int:
    """Return pairs x N x H."""
    query, window = args["query"], args.get("window_size")
    borders = known(args["cu_seq_q"]), known(args["cu_seq_k"])
    assert borders[0] is not None
    assert borders[1] is not None
    return pairs(borders[0], borders[1], window[0] if window else -1) * query.shape[1] * query.shape[2]


def _packed(known: Known, args: Mapping[str, Any]) -> Cost:
    """(query, key, value, low_t, high_t, ...): two products over the keys that each query sees."""
    return Cost(4 * _seen(known, args), 0)


def _packed_backward(known: Known, args: Mapping[str, Any]) -> Cost:
    """Seven products: two kernels, for queries and for keys, which both compute the scores and their gradients."""
    tokens, heads, _ = args["query"].shape
    return Cost(14 * _seen(known, args), packed_backward_scratch(tokens, heads))


def _seen(known: Known, args: Mapping[str, Any]) -> int:
    """Return pairs x N x H from the first and the last key of each query."""
    query, low, high = args["query"], known(args["low_t"]), known(args["high_t"])
    assert low is not None
    assert high is not None
    return int((high.astype(np.int64) - low + 1).sum()) * query.shape[1] * query.shape[2]


def _nothing(known: Known, args: Mapping[str, Any]) -> Cost:
    """Count no products: one pass over the logits."""
    return Cost(0, 0)


# operator -> what a call with these arguments, by name, costs
KERNELS: dict[str, Callable[[Known, Mapping[str, Any]], Cost]] = {
    "torch_attn::_varlen_attn": _varlen,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
    "megatron_ext::packed_attention": _packed,
    "megatron_ext::packed_attention_backward": _packed_backward,
    "megatron_ext::softmax_statistics": _nothing,
    "megatron_ext::softmax_gradient": _nothing,
}
