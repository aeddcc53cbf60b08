"""Measure a step operator by operator: memory, FLOPs, collectives, host synchronizations.

Operators are intercepted when torch dispatches them, on fake CUDA tensors or real CPU tensors, with the same counting.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from megatron_ext.run.rehearsal.costs import PRODUCTS, Collectives, attention_cost
from megatron_ext.run.rehearsal.memory import AllocationTracker, Part, Sites

aten = torch.ops.aten
MOST_KNOWN = 2**26  # maximum size of an integer tensor whose values are tracked: which experts each token has
# operators whose output shape depends on values: they synchronize the host
_SHAPED_BY_VALUES = {
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.bincount,
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
    """Measures everything that runs inside the context: on fake CUDA tensors, or on real ones of the CPU (`device`).

    `sizes` and `named` are as for `Collectives`.
    """

    def __init__(self, device: str, sizes: Sequence[int], named: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.device, self.sites, self.collectives = device, Sites(), Collectives(sizes, named or {})
        self.allocations, self.pinned = AllocationTracker(), AllocationTracker()  # of the device; of pinned host memory
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if device == "cuda" else contextlib.nullcontext()
        self._contexts = contextlib.ExitStack()
        self.begin()
        self._values: dict[int, tuple[weakref.ref[Any], Tensor]] = {}  # by storage

    def __enter__(self) -> "Meter":
        """Enter the context; also intercept in-place resizes of storages, which torch does not dispatch."""
        storage: Any = torch.UntypedStorage
        resize = storage.resize_

        def resize_(resized: torch.UntypedStorage, size: int) -> Any:
            done = resize(resized, size)
            self.allocations.resize(resized, self.sites.describe()[1])
            return done

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
        self.collectives.groups.clear()
        self.allocations.reset_peak()
        self.pinned.reset_peak()

    def note_sync(self, what: str) -> None:
        """Count a host synchronization."""
        where = self.sites.line()[1] or "torch's backward"
        self.host_syncs[f"{what}, {where}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        packet, pinned = func._overloadpacket, kwargs.get("pin_memory")
        if func.namespace == "c10d":
            self.collectives.note(func, args)
            if packet in _JOINED and self.device == "cuda":
                return FakeWork().boxed()
        elif func.namespace == "aten":
            answer = self._answer(packet, args, kwargs)
            if answer is not NotImplemented:
                return answer
        if packet is aten._to_copy and self.device == "cuda" and not isinstance(args[0], FakeTensor):
            # a real host tensor: torch would perform a real copy
            out = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs.get("device"))
        elif packet is aten.masked_select and self.device == "cuda" and (chosen := self.values(args[1])) is not None:
            with _disable_current_modes():
                number = int(chosen.sum())
            out = args[0].new_empty((number,))
        else:
            out = func(*args, **kwargs)
        if pinned:
            self.pinned.add(out.untyped_storage(), Part.OTHER, "")
        self._count(func, packet, args, kwargs, out)
        with _disable_current_modes():
            self._follow(func, packet, args, kwargs, out)
        return out

    # --- counting

    def _count(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        here = [one for one in tree_leaves(out) if isinstance(one, Tensor) and one.device.type == self.device]
        for tensor in here:
            storage = tensor.untyped_storage()
            if not self.allocations.knows(storage):
                self.allocations.add(storage, *self.sites.describe())
        name = f"{func.namespace}::{func._opname}"
        if name in PRODUCTS:
            names = [argument.name for argument in func._schema.arguments]
            named = dict(zip(names, args, strict=False)) | kwargs
            pairs, scratch = attention_cost(name, named, self.known_values)
            self.count_attention(name, PRODUCTS[name], pairs, named["query"])
            self.allocations.transient(scratch, Part.OTHER, f"{name}, scratch")
        elif packet in flop_registry and (here or (out is None and any(map(self._counts, args)))):
            # None: added to an argument
            self.flops[name] += flop_registry[packet](*args, **kwargs, out_val=out)

    def count_attention(self, name: str, products: int, pairs: int, query: Tensor) -> None:
        """Count the FLOPs of matrix products over (query, key) pairs, for all heads of `query`, [t, N, H]."""
        _, heads, size = query.shape
        self.flops[name] += 2 * products * pairs * heads * size

    # --- host synchronizations, and values that fake tensors do not have

    def _answer(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a host synchronization; return the operator's result if its tensor has no values."""
        if packet is aten._local_scalar_dense:
            return self._scalar(args[0])
        if packet in _COPIES:
            self._note_copy(packet, args, kwargs)
        elif packet is aten.is_pinned:
            return True
        elif packet is aten._pin_memory:
            return args[0]
        elif packet in _SHAPED_BY_VALUES and self._counts(args[0]):
            self.note_sync(f"the shape of {packet._qualified_op_name.removeprefix('aten::')}")
            if packet is aten.nonzero and isinstance(args[0], FakeTensor):
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif packet in (aten.index, aten.index_put, aten.index_put_) and self._counts(args[0]):
            filled = packet is not aten.index and args[2].numel() == 1  # torch fills under the mask and does not wait
            masks = [one for one in args[1] if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)]
            if masks and not filled:
                self.note_sync("the shape of an index by a mask")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # a fake tensor cannot be pinned
        return NotImplemented

    def _counts(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device

    def _scalar(self, tensor: Tensor) -> Any:
        if self._counts(tensor) and self.device == "cuda":
            self.note_sync("a number")
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return tensor.item()
        known = self.values(tensor)
        if known is not None:
            with _disable_current_modes():
                return known.item()
        if tensor.constant is not None:
            return tensor.constant.item()
        # unknown: 1, which is a finite number, true, and triggers no warning
        return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _note_copy(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.device == "cpu":
            return
        source = args[0] if packet is aten._to_copy else args[1]
        if not isinstance(source, Tensor):
            return
        if isinstance(source, FakeTensor) and source.constant is not None:
            # torch would compute on the constant itself, with a kernel of the device
            self.remember(source, source.constant)
            source.constant = None
        target = kwargs.get("device") or source.device if packet is aten._to_copy else args[0].device
        target = torch.device(target).type
        blocking = not (kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2]))
        if source.device.type == "cuda" and target == "cpu" and blocking:
            self.note_sync("a copy to the host")
        elif source.device.type == "cpu" and target == "cuda" and blocking:
            self.note_sync("a copy from the host")

    # --- values of small integer tensors

    def values(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values if they are known: copied from the host, or computed from such tensors."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        found = self._values.get(tensor.untyped_storage()._cdata)
        if found is None or found[1].dtype != tensor.dtype:
            return None
        with _disable_current_modes():
            return found[1].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def known_values(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return the values of a tensor that must be known."""
        known = self.values(tensor)
        assert known is not None
        with _disable_current_modes():
            return known.numpy()

    def remember(self, tensor: Tensor, values: Tensor) -> None:
        """Set the values of a tensor, as long as its storage exists."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with _disable_current_modes():
            flat = torch.zeros(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype)
            flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(values)
        self._values[key] = weakref.ref(storage, lambda _: self._values.pop(key, None)), flat

    def _follow(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Track the values of an operator's result, if they can be known and may be needed."""
        if func._schema.is_mutable or func.namespace == "c10d":
            for written in tree_leaves(args[:1]):
                if isinstance(written, FakeTensor):
                    self._values.pop(written.untyped_storage()._cdata, None)
            if packet is c10d._allgather_base_ and isinstance(args[0], FakeTensor) and not _is_large(args[0]):
                gathered, mine = args[0], self.values(args[1])
                if mine is not None:
                    # all ranks have the same numbers, because all send the same number of tokens to each expert
                    self.remember(gathered, torch.cat([mine] * (len(gathered) // len(mine))))
            if packet is not aten.copy_:
                return
        made = tree_leaves(out)
        if any(not isinstance(one, FakeTensor) or _is_large(one) for one in made):
            return
        # torch tests numbers by comparing them with inf, and with themselves for NaN
        compares_with_number = packet is aten.ne and not isinstance(args[1], Tensor)
        compares_with_itself = packet is aten.eq and args[0] is args[1]
        if packet in (aten.any, aten.all) or compares_with_number or compares_with_itself:
            # assumed: all numbers are finite, `any` is False
            self.remember(out, torch.tensor(packet is not aten.any))
        elif packet in (*_COPIES, *_LIFTS):
            source = self.values(args[1] if packet is aten.copy_ else args[0])
            if source is not None:
                self.remember(out, source)
        elif packet in _FOLLOWED:
            self._follow_computed(func, args, kwargs, made)

    def _follow_computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[FakeTensor]
    ) -> None:
        """Also compute an operator on real values if all of its tensors are known; `made` are its fake results."""
        leaves, spec = tree_flatten((args, kwargs))
        real = [self.values(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(isinstance(leaf, Tensor) and value is None for leaf, value in zip(leaves, real, strict=True)):
            return
        real_args, real_kwargs = tree_unflatten(real, spec)
        if "device" in real_kwargs:
            real_kwargs["device"] = "cpu"
        for tensor, values in zip(made, tree_leaves(func(*real_args, **real_kwargs)), strict=True):
            self.remember(tensor, values)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() > (1 if tensor.is_floating_point() else MOST_KNOWN)
