"""Count the bytes of the storages on a device by purpose, and record the peak.

A storage counts from the operator that allocates it until its last reference is gone. torch's MemTracker only counts by
module: it supports neither labels nor scratch memory of kernels. The caching allocator's rounding (512 bytes) and
fragmentation are ignored.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import StrEnum

import torch


class Part(StrEnum):
    """The purpose of a storage."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    EXCHANGE = "exchange"
    OTHER = "other"


@dataclass(frozen=True)
class Peak:
    """The bytes of each part at the peak, and where the peak was.

    Attributes:
        parts: bytes of each part.
        site: the last allocation.
    """

    parts: dict[Part, int]
    site: str

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())


@dataclass
class _Storage:
    size: int
    part: Part
    reference: weakref.ref[torch.UntypedStorage]


class AllocationTracker:
    """Tracks the storages of one device."""

    def __init__(self) -> None:
        self._live: dict[int, _Storage] = {}
        self.bytes = dict.fromkeys(Part, 0)  # live, of each part
        self.total = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Start a new peak from the live storages."""
        self.peak = Peak(dict(self.bytes), "the start")

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the storage is already counted."""
        return storage._cdata in self._live

    def add(self, storage: torch.UntypedStorage, part: Part, site: str) -> None:
        """Count a new storage until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        self._live[key] = _Storage(size, part, weakref.ref(storage, lambda _: self._free(key)))
        self._change(part, size, site)

    def resize(self, storage: torch.UntypedStorage, site: str) -> None:
        """Update a storage whose size was changed in place, as recomputation frees and restores storages."""
        known = self._live.get(storage._cdata)
        if known is not None:
            grown, known.size = storage.nbytes() - known.size, storage.nbytes()
            self._change(known.part, grown, site)

    def label(self, storage: torch.UntypedStorage, part: Part) -> None:
        """Change the purpose of a storage."""
        known = self._live.get(storage._cdata)
        if known is not None:
            self._relabel(known, part)

    def label_rest(self, part: Part, kept: tuple[Part, ...]) -> None:
        """Set the purpose of all live storages, except those of the parts `kept`."""
        for known in self._live.values():
            if known.part not in kept:
                self._relabel(known, part)

    def transient(self, size: int, part: Part, site: str) -> None:
        """Count bytes that a kernel allocates and frees within one operator."""
        self._change(part, size, site)
        self._change(part, -size, site)

    def _change(self, part: Part, size: int, site: str) -> None:
        self.bytes[part] += size
        self.total += size
        if self.total > self.peak.total:
            self.peak = Peak(dict(self.bytes), site)

    def _relabel(self, known: _Storage, part: Part) -> None:
        self.bytes[known.part] -= known.size
        self.bytes[part] += known.size
        known.part = part
        if self.total == self.peak.total:
            self.peak = Peak(dict(self.bytes), self.peak.site)

    def _free(self, key: int) -> None:
        known = self._live.pop(key)
        self._change(known.part, -known.size, "")
