"""Count the bytes of the storages on a device by purpose, record the peak, and find where storages are allocated.

A storage counts from the operator that allocates it until its last reference is gone. torch's MemTracker only counts by
module: it supports neither labels nor scratch memory of kernels. The caching allocator's rounding (512 bytes) and
fragmentation are ignored.
"""

import sys
import weakref
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import UntypedStorage
from torch.nn.modules import module as module_hooks


class Part(StrEnum):
    """The purpose of a storage."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    EXCHANGE = "exchange"
    OTHER = "other"


_PACKAGE = Path(__file__).resolve().parents[1]
_HERE = Path(__file__).resolve().parent
# files whose storages have a single purpose, by path suffix
_PARTS = {
    "megatron_ext/loss.py": Part.LOGITS,
    "megatron_ext/context_parallel/exchange.py": Part.EXCHANGE,
    "megatron/core/tensor_parallel/mappings.py": Part.EXCHANGE,
    "megatron/core/utils.py": Part.EXCHANGE,  # GlobalMemoryBuffer: gathered tensors of sequence parallelism
    "megatron/core/pipeline_parallel/p2p_communication.py": Part.EXCHANGE,
}


@dataclass(frozen=True)
class Peak:
    """The bytes of each part at the peak, and the allocation that reached it."""

    parts: dict[Part, int]
    site: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class _Storage:
    size: int
    part: Part
    reference: weakref.ref[UntypedStorage]


class AllocationTracker:
    """Tracks the storages of one device."""

    def __init__(self) -> None:
        self._live: dict[int, _Storage] = {}
        self.bytes = dict.fromkeys(Part, 0)  # live, of each part
        self.reset_peak()

    def reset_peak(self) -> None:
        """Start a new peak from the live storages."""
        self.peak = Peak(dict(self.bytes), "the start")

    def knows(self, storage: UntypedStorage) -> bool:
        """Return whether the storage is already counted."""
        return storage._cdata in self._live

    def add(self, storage: UntypedStorage, part: Part, site: str) -> None:
        """Count a new storage until it is freed."""
        key = storage._cdata
        size = storage.nbytes()
        self._live[key] = _Storage(size, part, weakref.ref(storage, lambda _: self._free(key)))
        self._change(part, size, site)

    @property
    def total(self) -> int:
        """Live bytes."""
        return sum(self.bytes.values())

    def resize(self, storage: UntypedStorage, site: str) -> None:
        """Update a storage whose size was changed in place, as recomputation frees and restores storages."""
        live = self._live.get(storage._cdata)
        if live is not None:
            growth = storage.nbytes() - live.size
            live.size += growth
            self._change(live.part, growth, site)

    def label(self, storage: UntypedStorage, part: Part) -> None:
        """Change the purpose of a storage."""
        live = self._live.get(storage._cdata)
        if live is not None:
            self._relabel(live, part)

    def label_rest(self, part: Part, kept: Container[Part]) -> None:
        """Change the purpose of all storages, except in the parts `kept`."""
        for live in self._live.values():
            if live.part not in kept:
                self._relabel(live, part)

    def transient(self, size: int, site: str) -> None:
        """Count bytes that a kernel allocates and frees within one operator."""
        self._change(Part.OTHER, size, site)
        self.bytes[Part.OTHER] -= size

    def _change(self, part: Part, size: int, site: str) -> None:
        self.bytes[part] += size
        if self.total > self.peak.total:
            self.peak = Peak(dict(self.bytes), site)

    def _relabel(self, live: _Storage, part: Part) -> None:
        self.bytes[live.part] -= live.size
        self.bytes[part] += live.size
        live.part = part

    def _free(self, key: int) -> None:
        freed = self._live.pop(key)
        self.bytes[freed.part] -= freed.size


class Sites:
    """Tracks the modules being called, and inspects the stack; `name` records a model's modules."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        # the modules being called in a thread, the innermost last; backward passes recompute modules in other threads
        self._calls: dict[int, list[torch.nn.Module]] = defaultdict(list)

    def name(self, model: torch.nn.Module) -> None:
        """Record the names of a model's modules."""
        for name, module in model.named_modules():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            self._names[id(module)] = name

    def __enter__(self) -> "Sites":
        def enter(module: torch.nn.Module, args: Any) -> None:
            self._calls[get_ident()].append(module)

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            self._calls[get_ident()].pop()

        self._hooks = (
            module_hooks.register_module_forward_pre_hook(enter),
            module_hooks.register_module_forward_hook(leave, always_call=True),
        )
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def line(self) -> tuple[str, str]:
        """Return the innermost file of this package or of Megatron on the stack, and file:line; "" for none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = shown(frame.f_code.co_filename)
            if file is not None:
                return file, f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return "", ""

    def describe(self) -> tuple[Part, str]:
        """Return the purpose and the allocation site of a storage created now."""
        file, line = self.line()
        modules = self._calls[get_ident()]
        names = [self._names.get(id(module)) for module in modules]
        where = next(filter(None, reversed(names)), "")
        node = torch._C._current_autograd_node()
        if node is not None and not where:
            where = f"backward, {node.name()}"
        site = " ".join(filter(None, (where, line))) or "the run's own code"
        return _PARTS.get(file, Part.ACTIVATIONS if modules else Part.OTHER), site


@cache
def shown(filename: str) -> str | None:
    """Return a path relative to its package, for files of this package or of Megatron; None for others."""
    path = Path(filename)
    if path.is_relative_to(_HERE):
        return None
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE.parent))
    _, name, inside = filename.rpartition("/megatron/")
    if name and "core" in inside.split("/"):
        return f"megatron/{inside}"
    return None
