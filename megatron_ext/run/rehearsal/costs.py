"""Compute what operators cost: the FLOPs and scratch memory of attention kernels, and the bytes that collectives send.

FLOPs of attention are those of the (query, key) pairs of its segments. Bytes are those that this rank sends by the
usual algorithms among n ranks: an all-gather sends (n - 1) times the rank's part, a reduce-scatter (n - 1) / n of the
whole, an all-reduce both of these, an all-to-all the parts for other ranks. torch's CommDebugMode only counts calls;
its CollectiveOp takes whole storages for a bucket's slice.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import layout
from megatron_ext.planning.memory import flash_backward_scratch

# attention operators, and their matrix products over all (query, key) pairs: the backward of flash attention recomputes
# the scores and computes the gradients of values, probabilities, queries and keys; our kernels compute the scores and
# their gradients twice
PRODUCTS = {
    "torch_attn::_varlen_attn": 2,
    "torch_attn::_varlen_attn_backward": 5,
    "megatron_ext::packed_attention": 2,
    "megatron_ext::packed_attention_backward": 7,
}


def attention_cost(name: str, args: Mapping[str, Any], values: Callable[[Tensor], npt.NDArray[Any]]) -> tuple[int, int]:
    """Return the (query, key) pairs of an operator of `PRODUCTS`, and the bytes that it allocates and frees.

    Args:
        name, args: the operator's, arguments by name.
        values: returns the values of a tensor of borders.
    """
    query = args["query"]
    t, heads, head_size = query.shape
    if "packed" in name:
        first, last = (values(args[border]).astype(np.int64) for border in ("low_t", "high_t"))
        pairs = int((last - first + 1).sum())
        scratch = 4 * t * heads  # a float for each query and head
    else:
        borders, (keys, key_heads, _) = args["cu_seq_q"], args["key"].shape
        left = args["window_size"][0]  # -1: unbounded
        pairs = segment_pairs(values(borders), values(args["cu_seq_k"]), left if left >= 0 else None)
        sizes = t, keys, len(borders) - 1, heads, key_heads, head_size, query.element_size()
        scratch = flash_backward_scratch(*sizes)
    return pairs, scratch if name.endswith("backward") else 0


def segment_pairs(borders_q: npt.NDArray[Any], borders_kv: npt.NDArray[Any], left_window: int | None) -> int:
    """Count the (query, key) pairs of causal segments aligned at the bottom right.

    Args:
        borders_q, borders_kv: [S+1], of the segments' queries and keys.
        left_window: maximum number of keys before itself that a query sees; None for all.
    """
    wide_q, wide_kv = borders_q.astype(np.int64), borders_kv.astype(np.int64)
    queries, keys = wide_q[1:] - wide_q[:-1], wide_kv[1:] - wide_kv[:-1]
    # the queries are the last tokens among the keys
    return int((layout.segment_pairs(keys, left_window) - layout.segment_pairs(keys - queries, left_window)).sum())


# rank order in Megatron's default: tensor-parallel ranks are adjacent, pipeline stages furthest apart
AXES = ("TP", "CP", "DP", "PP")


class Collectives:
    """Counts collectives and the bytes that this rank sends, by the axes along which the ranks of a group differ.

    Args:
        sizes: processes along each of `AXES`.
        named: names by group_name, for groups with the same ranks as another group: experts are sharded over data-
            and context-parallel ranks.
    """

    def __init__(self, sizes: Sequence[int], named: Mapping[str, str]) -> None:
        self._named = named
        self._name = lru_cache(maxsize=None)(lambda ranks: name_of(ranks, sizes))
        self.groups: dict[str, Counter[str]] = defaultdict(Counter)

    def note(self, func: Any, args: Sequence[Any]) -> None:
        """Count an operator of namespace c10d."""
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        assert boxed, f"{func} names no process group"
        group = dist.ProcessGroup.unbox(boxed[0])
        ranks = tuple(dist.get_process_group_ranks(group))
        name = func._schema.name.removeprefix("c10d::").strip("_")
        sent = sent_bytes(name, args, len(ranks), ranks.index(dist.get_rank()))
        self.groups[self._named.get(group.group_name) or self._name(ranks)].update(count=1, sent_bytes=sent)


def name_of(ranks: Sequence[int], sizes: Sequence[int]) -> str:
    """Name a group after the axes along which its ranks differ: "TP", "CP x DP"; "alone" for one rank."""
    places = np.unravel_index(ranks, sizes, order="F")  # along each axis
    return " x ".join(axis for axis, along in zip(AXES, places, strict=True) if np.ptp(along)) or "alone"


def sent_bytes(name: str, args: Sequence[Any], n: int, own: int) -> int:
    """Return the bytes that rank `own` of `n` sends in a collective of c10d."""
    match name:
        case "allreduce" | "allreduce_coalesced":
            return 2 * (n - 1) * _size(args[0]) // n
        case "reduce" | "broadcast":
            return (n - 1) * _size(args[0]) // n
        case "allgather" | "allgather_base" | "allgather_into_tensor_coalesced":
            return (n - 1) * _size(args[1])
        case "reduce_scatter" | "reduce_scatter_base" | "reduce_scatter_tensor_coalesced":
            return (n - 1) * _size(args[1]) // n
        case "alltoall_base":  # (output, input, group, output splits, input splits, ...)
            rows, counts = args[1], args[4]
            kept = counts[own] if counts else len(rows) // n
            return (len(rows) - kept) * (_size(rows) // max(len(rows), 1))
        case "alltoall":
            return _size(args[1]) - _size(args[1][own])
        case "send":
            return _size(args[0])
        case "recv" | "recv_any_source" | "barrier":
            return 0
    raise NotImplementedError(f"no count of bytes for the collective {name}")


def _size(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_size, tensors))
