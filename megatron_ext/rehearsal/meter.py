"""Measure a step operator by operator: memory, FLOPs, collectives, host synchronizations.

Operators are intercepted when torch dispatches them, on fake CUDA tensors or real CPU tensors, with the same counting.
The FLOPs of attention are counted from the (query, key) pairs of its segments. torch's CommDebugMode only counts calls
of collectives; its CollectiveOp takes whole storages for a bucket's slice.
"""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from megatron_ext import layout
from megatron_ext.planning.memory import flash_backward_scratch
from megatron_ext.rehearsal.memory import AllocationTracker, Part, Sites

# rank order in Megatron's default: tensor-parallel ranks are adjacent, pipeline stages furthest apart
AXES = ("TP", "CP", "DP", "PP")
# attention operators, and their matrix products over all (query, key) pairs: the backward of flash attention recomputes
# the scores and computes the gradients of values, probabilities, queries and keys
PRODUCTS = {"torch_attn::_varlen_attn": 2, "torch_attn::_varlen_attn_backward": 5}
Args = tuple[Any, ...]  # an operator's positional arguments
Options = dict[str, Any]  # arguments by name
Values = npt.NDArray[Any]
aten = torch.ops.aten
MOST_KNOWN = 2**26  # maximum size of an integer tensor whose values are tracked: which experts each token has
# operators whose output shape depends on values: they synchronize the host
_SHAPED_BY_VALUES = {
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.bincount)
}
c10d = torch.ops.c10d
# collectives that torch coalesces; fake tensors do not support them
_JOINED = {c10d.allgather_into_tensor_coalesced_, c10d.reduce_scatter_tensor_coalesced_, c10d.allreduce_coalesced_}
_LIFTS = (aten.lift_fresh, aten.lift_fresh_copy)  # dispatched by torch.tensor and torch.from_numpy for their result
_COPIES = (aten._to_copy, aten.copy_)
# also computed on real values if all inputs are known: tracks the values of borders and counts
_FOLLOWED = {
    *(aten.clone, aten.cat, aten.stack, aten.add, aten.sub, aten.mul, aten.cumsum, aten.amax, aten.amin, aten.clamp),
    *(aten.bitwise_and, aten.bitwise_not, aten.bitwise_or, aten.logical_and, aten.logical_not, aten.sum),
    *(aten.maximum, aten.arange, aten.repeat_interleave, aten.index_select, aten.searchsorted),
    *(aten.le, aten.sort, aten.index, aten.constant_pad_nd),
}


class Meter(TorchDispatchMode):
    """Measures everything that runs inside the context: fake CUDA tensors, or real tensors of the CPU (`device`).

    Args:
        sizes: processes along each of `AXES`.
        named: names by group_name, for groups with the same ranks as another group: experts are sharded over data-
            and context-parallel ranks.
    """

    def __init__(self, device: str, sizes: tuple[int, ...], named: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.device = device
        self.sites = Sites()
        self._sizes = sizes
        self._named = named or {}
        self.allocations = AllocationTracker()  # of the device
        self.pinned = AllocationTracker()  # of pinned host memory
        self._fake: Any = contextlib.nullcontext()
        if device == "cuda":
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._contexts = contextlib.ExitStack()
        self.begin()
        self._values: dict[int, tuple[weakref.ref[Any], Tensor]] = {}  # by storage

    def __enter__(self) -> "Meter":
        """Enter the context; also intercept in-place resizes of storages, which torch does not dispatch."""
        storage: Any = torch.UntypedStorage
        resize = storage.resize_

        def resize_(resized: torch.UntypedStorage, size: int) -> Any:
            result = resize(resized, size)
            self.allocations.resize(resized, self.sites.describe()[1])
            return result

        storage.resize_ = resize_
        self._contexts.callback(setattr, storage, "resize_", resize)
        self._contexts.enter_context(self._fake)
        self._contexts.enter_context(self.sites)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.close()

    def begin(self) -> None:
        """Reset the counts; live storages stay counted."""
        self.flops: Counter[str] = Counter()  # by operator
        self.host_syncs: Counter[str] = Counter()  # by cause and line
        # by the axes along which the ranks of a group differ: `count`, and the `sent_bytes` of this rank
        self.collectives: dict[str, Counter[str]] = defaultdict(Counter)
        self.allocations.reset_peak()
        self.pinned.reset_peak()

    def note_sync(self, what: str) -> None:
        """Count a host synchronization."""
        where = self.sites.line()[1] or "torch's backward"
        self.host_syncs[f"{what}, {where}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet = func._overloadpacket
        pinned = kwargs.get("pin_memory")
        if func.namespace == "c10d":
            self._count_collective(func, args)
            if packet in _JOINED and self.device == "cuda":
                return FakeWork().boxed()
        elif func.namespace == "aten":
            answer = self._answer(packet, args, kwargs)
            if answer is not NotImplemented:
                return answer
        out = self._compute(func, packet, args, kwargs)
        if pinned:
            self.pinned.add(out.untyped_storage(), Part.OTHER, "")
        self._count(func, packet, args, kwargs, out)
        with _disable_current_modes():
            self._follow(func, packet, args, kwargs, out)
        return out

    def _compute(self, func: Any, packet: Any, args: Args, kwargs: Options) -> Any:
        """Compute an operator, or its output's shape where torch would read values that fake tensors do not have."""
        if self.device == "cuda" and packet is aten._to_copy and not isinstance(args[0], FakeTensor):
            # a real host tensor: torch would perform a real copy
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs.get("device"))
        if self.device == "cuda" and packet is aten.masked_select:
            mask = self.values(args[1])
            if mask is not None:
                with _disable_current_modes():
                    number = int(mask.sum())
                return args[0].new_empty((number,))
        return func(*args, **kwargs)

    # --- counting

    def _count(self, func: Any, packet: Any, args: Args, kwargs: Options, out: Any) -> None:
        on_device = list(filter(self._counts, tree_leaves(out)))
        for tensor in on_device:
            storage = tensor.untyped_storage()
            if not self.allocations.knows(storage):
                self.allocations.add(storage, *self.sites.describe())
        name = f"{func.namespace}::{func._opname}"
        if name in PRODUCTS:
            names = [argument.name for argument in func._schema.arguments]
            self._count_attention_operator(name, dict(zip(names, args, strict=False)) | kwargs)
        elif packet in flop_registry and (on_device or (out is None and any(map(self._counts, args)))):
            # None: added to an argument
            self.flops[name] += flop_registry[packet](*args, **kwargs, out_val=out)

    def _count_attention_operator(self, name: str, args: Options) -> None:
        """Count an operator of `PRODUCTS`, with the scratch memory of a backward pass; `args` by name."""
        query = args["query"]
        left_window = args["window_size"][0]
        if left_window < 0:
            left_window = None
        borders_q = self.known_values(args["cu_seq_q"])
        pairs = segment_pairs(borders_q, self.known_values(args["cu_seq_k"]), left_window)
        self.count_attention(name, PRODUCTS[name], pairs, query)
        if name.endswith("backward"):
            t, heads, head_size = query.shape
            keys, key_heads, _ = args["key"].shape
            segments = len(borders_q) - 1
            scratch = flash_backward_scratch(t, keys, segments, heads, key_heads, head_size, query.element_size())
            self.allocations.transient(scratch, f"{name}, scratch")

    def count_attention(self, name: str, products: int, pairs: int, query: Tensor) -> None:
        """Count the FLOPs of matrix products over (query, key) pairs, for all heads of `query`, [t, N, H]."""
        _, heads, size = query.shape
        self.flops[name] += 2 * products * pairs * heads * size

    def _count_collective(self, func: Any, args: Sequence[Any]) -> None:
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        assert boxed, f"{func} names no process group"
        group = dist.ProcessGroup.unbox(boxed[0])
        ranks = tuple(dist.get_process_group_ranks(group))
        name = func._schema.name.removeprefix("c10d::").strip("_")
        sent = sent_bytes(name, args, len(ranks), ranks.index(dist.get_rank()))
        named = self._named.get(group.group_name) or name_of(ranks, self._sizes)
        self.collectives[named].update(count=1, sent_bytes=sent)

    # --- host synchronizations, and values that fake tensors do not have

    def _answer(self, packet: Any, args: Args, kwargs: Options) -> Any:
        """Record a host synchronization; return the operator's result if its tensor has no values."""
        if packet is aten._local_scalar_dense:
            return self._scalar(args[0])
        if packet in _COPIES:
            self._note_copy(packet, args, kwargs)
        elif packet is aten.is_pinned:
            return True
        elif packet in _SHAPED_BY_VALUES and self._counts(args[0]):
            self.note_sync(f"the shape of {packet._qualified_op_name.removeprefix('aten::')}")
            if packet is aten.nonzero and isinstance(args[0], FakeTensor):
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif packet in (aten.index, aten.index_put, aten.index_put_) and self._counts(args[0]):
            fills = packet is not aten.index and args[2].numel() == 1  # torch fills under the mask and does not wait
            if not fills and any(
                isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            ):
                self.note_sync("the shape of an index by a mask")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # a fake tensor cannot be pinned
        return NotImplemented

    def _counts(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device

    def _scalar(self, tensor: Any) -> Any:
        if self._counts(tensor) and self.device == "cuda":
            self.note_sync("a number")
        value = self.values(tensor)
        if value is None:
            value = tensor.constant
        with _disable_current_modes():
            if value is None:  # 1 is a finite number, true, and triggers no warning
                value = torch.ones((), dtype=tensor.dtype)
            return value.item()

    def _note_copy(self, packet: Any, args: Args, kwargs: Options) -> None:
        blocking = not kwargs.get("non_blocking")
        if packet is aten._to_copy:
            source = args[0]
            target = torch.device(kwargs.get("device") or source.device).type
        else:
            source = args[1]
            target = args[0].device.type
            blocking = blocking and not any(args[2:])
        if isinstance(source, FakeTensor) and source.constant is not None:
            # torch would compute on the constant itself, with a kernel of the device
            self.remember(source, source.constant)
            source.constant = None
        if source.device.type == "cuda" and target == "cpu" and blocking:
            self.note_sync("a copy to the host")
        elif source.device.type == "cpu" and target == "cuda" and blocking:
            self.note_sync("a copy from the host")

    # --- values of small integer tensors

    def values(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values if they are known: copied from the host, or computed from such tensors."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        _, flat = self._values.get(tensor.untyped_storage()._cdata, (None, None))
        if flat is None or flat.dtype != tensor.dtype:
            return None
        with _disable_current_modes():
            return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def known_values(self, tensor: Tensor) -> Values:
        """Return the values of a tensor that must be known."""
        values = self.values(tensor)
        assert values is not None
        with _disable_current_modes():
            return values.numpy()

    def remember(self, tensor: Tensor, values: Tensor) -> None:
        """Set the values of a tensor, as long as its storage exists."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with _disable_current_modes():
            flat = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype)
            flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(values)
        self._values[key] = weakref.ref(storage, lambda _: self._values.pop(key, None)), flat

    def _follow(self, func: Any, packet: Any, args: Args, kwargs: Options, out: Any) -> None:
        """Track the values of an operator's result, if they can be known and may be needed."""
        if func._schema.is_mutable or func.namespace == "c10d":
            for written in tree_leaves(args[:1]):
                if isinstance(written, FakeTensor):
                    self._values.pop(written.untyped_storage()._cdata, None)
            if packet is c10d._allgather_base_ and isinstance(args[0], FakeTensor) and not _is_large(args[0]):
                values = self.values(args[1])
                if values is not None:
                    # all ranks have the same numbers, because all send the same number of tokens to each expert
                    self.remember(args[0], torch.cat([values] * (len(args[0]) // len(values))))
            if packet is not aten.copy_:
                return
        results = tree_leaves(out)
        if any(not isinstance(result, FakeTensor) or _is_large(result) for result in results):
            return
        # torch tests numbers by comparing them with inf, and with themselves for NaN
        compares_with_number = packet is aten.ne and not isinstance(args[1], Tensor)
        compares_with_itself = packet is aten.eq and args[0] is args[1]
        if packet in (aten.any, aten.all) or compares_with_number or compares_with_itself:
            # assumed: all numbers are finite, `any` is False
            self.remember(out, torch.tensor(packet is not aten.any))
        elif packet in (*_COPIES, *_LIFTS):
            values = self.values(args[1 if packet is aten.copy_ else 0])
            if values is not None:
                self.remember(out, values)
        elif packet in _FOLLOWED:
            leaves, spec = tree_flatten((args, kwargs))
            real = [self.values(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            if any(isinstance(leaf, Tensor) and value is None for leaf, value in zip(leaves, real, strict=True)):
                return
            real_args, real_kwargs = tree_unflatten(real, spec)
            if "device" in real_kwargs:
                real_kwargs["device"] = "cpu"
            for tensor, values in zip(results, tree_leaves(func(*real_args, **real_kwargs)), strict=True):
                self.remember(tensor, values)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() > (1 if tensor.is_floating_point() else MOST_KNOWN)


def segment_pairs(borders_q: Values, borders_kv: Values, left_window: int | None) -> int:
    """Count the (query, key) pairs of causal segments aligned at the bottom right.

    Args:
        borders_q, borders_kv: [S+1], of the segments' queries and keys.
        left_window: maximum number of keys before itself that a query sees; None for all.
    """
    queries = np.diff(borders_q).astype(np.int64)
    keys = np.diff(borders_kv).astype(np.int64)
    # the queries are the last tokens among the keys
    return int((layout.segment_pairs(keys, left_window) - layout.segment_pairs(keys - queries, left_window)).sum())


@cache
def name_of(ranks: Sequence[int], sizes: Sequence[int]) -> str:
    """Name a group after the axes along which its ranks differ: "TP", "CP x DP"; "alone" for one rank."""
    places = np.unravel_index(ranks, sizes, order="F")  # along each axis
    return " x ".join(axis for axis, along in zip(AXES, places, strict=True) if np.ptp(along)) or "alone"


def sent_bytes(name: str, args: Sequence[Any], n: int, rank: int) -> int:
    """Return the bytes that a rank of `n` sends in a collective of c10d by the usual algorithm.

    An all-gather sends (n - 1) times the rank's part, a reduce-scatter (n - 1) / n of the whole, an all-reduce both of
    these, an all-to-all the parts for other ranks.
    """
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
            kept = len(rows) // n
            if counts:
                kept = counts[rank]
            return (len(rows) - kept) * (_size(rows) // max(len(rows), 1))
        case "alltoall":
            return _size(args[1]) - _size(args[1][rank])
        case "send":
            return _size(args[0])
        case "recv" | "recv_any_source" | "barrier":
            return 0
    raise NotImplementedError(f"the bytes of the collective {name} are not counted here")


def _size(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_size, tensors))
