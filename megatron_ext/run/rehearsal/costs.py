"""Compute what operators cost: the FLOPs and scratch memory of attention kernels, and the bytes that collectives send.

FLOPs of attention are those of the (query, key) pairs of its segments. Bytes are those that this rank sends by the
usual algorithms among n ranks: an all-gather sends (n - 1) times the rank's part, a reduce-scatter (n - 1) / n of the
whole, an all-reduce both of these, an all-to-all the parts for other ranks. torch's CommDebugMode only counts calls;
its CollectiveOp takes whole storages for a bucket's slice.

Legend: S segments, t queries, u keys, N query heads, G key heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.planning.memory import flash_backward_scratch, packed_backward_scratch

Values = Callable[[Tensor], npt.NDArray[Any]]  # of a tensor of borders, which the meter knows


class Kernel(NamedTuple):
    """The cost of an attention operator, given its arguments by name."""

    products: int  # matrix products over all (query, key) pairs
    pairs: Callable[[Values, Mapping[str, Any]], int]
    scratch: Callable[[Mapping[str, Any]], int] = lambda args: 0  # bytes that a call allocates and frees


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
}


# rank order in Megatron's default: tensor-parallel ranks are adjacent, pipeline stages furthest apart
AXES = ("TP", "CP", "DP", "PP")


@dataclass
class Calls:
    """The number of collectives of one group, and the bytes that this rank sends in them."""

    count: int = 0
    sent_bytes: int = 0


class Collectives:
    """Groups collectives by the axes along which the ranks of their groups differ.

    Args:
        sizes: processes along each of `AXES`.
        named: names by group_name, for groups with the same ranks as another group: experts are sharded over data-
            and context-parallel ranks.
    """

    def __init__(self, sizes: Sequence[int], named: Mapping[str, str]) -> None:
        self._named = named
        self._name = lru_cache(maxsize=None)(lambda ranks: name_of(ranks, sizes))
        self.groups: dict[str, Calls] = {}

    def note(self, func: Any, args: Sequence[Any]) -> None:
        """Count an operator of namespace c10d."""
        name = func._schema.name.removeprefix("c10d::").strip("_")
        group = _group(args)
        if group is None or name not in _SENT:
            raise NotImplementedError(f"no count of bytes for the collective {func}")
        ranks = tuple(dist.get_process_group_ranks(group))
        calls = self.groups.setdefault(self._named.get(group.group_name) or self._name(ranks), Calls())
        calls.count += 1
        calls.sent_bytes += _SENT[name](args, len(ranks), ranks.index(dist.get_rank()))


def name_of(ranks: Sequence[int], sizes: Sequence[int]) -> str:
    """Name a group after the axes along which its ranks differ: "TP", "CP x DP"; "alone" for one rank."""
    places = [tuple(_places(rank, sizes)) for rank in ranks]
    differing = [axis for axis, along in zip(AXES, zip(*places, strict=True), strict=True) if len(set(along)) > 1]
    return " x ".join(differing) or "alone"


def _places(rank: int, sizes: Sequence[int]) -> Iterator[int]:
    for size in sizes:
        rank, place = divmod(rank, size)
        yield place


def _group(args: Sequence[Any]) -> dist.ProcessGroup | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return None


def _size(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_size, tensors))


def _to_others(args: Sequence[Any], ranks: int, own: int) -> int:
    """Return the bytes that an all-to-all sends: (output, input, group, output splits, input splits, ...)."""
    rows, counts = args[1], args[4]
    kept = counts[own] if counts else len(rows) // ranks
    return (len(rows) - kept) * (_size(rows) // max(len(rows), 1))


# name -> (arguments, n, rank in the group) -> bytes sent
_SENT: dict[str, Callable[[Sequence[Any], int, int], int]] = {
    "allreduce": lambda args, n, own: 2 * (n - 1) * _size(args[0]) // n,
    "allreduce_coalesced": lambda args, n, own: 2 * (n - 1) * _size(args[0]) // n,
    "reduce": lambda args, n, own: (n - 1) * _size(args[0]) // n,
    "broadcast": lambda args, n, own: (n - 1) * _size(args[0]) // n,
    "allgather": lambda args, n, own: (n - 1) * _size(args[1]),
    "allgather_base": lambda args, n, own: (n - 1) * _size(args[1]),
    "allgather_into_tensor_coalesced": lambda args, n, own: (n - 1) * _size(args[1]),
    "reduce_scatter": lambda args, n, own: (n - 1) * _size(args[1]) // n,
    "reduce_scatter_base": lambda args, n, own: (n - 1) * _size(args[1]) // n,
    "reduce_scatter_tensor_coalesced": lambda args, n, own: (n - 1) * _size(args[1]) // n,
    "alltoall_base": _to_others,
    "alltoall": lambda args, n, own: _size(args[1]) - _size(args[1][own]),
    "send": lambda args, n, own: _size(args[0]),
    "recv": lambda args, n, own: 0,
    "recv_any_source": lambda args, n, own: 0,
    "barrier": lambda args, n, own: 0,
}
