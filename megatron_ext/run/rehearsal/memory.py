"""Counts the bytes of the storages that live on a device, by what they are for, and remembers the peak.

A storage counts from the operator that made it to its last owner's end. torch's own MemTracker does so too, by
module; it cannot be told what a storage is for, nor what a kernel takes for itself, and looks at one kind of model.
CUDA's allocator rounds each up to 512 bytes, and keeps what it cannot reuse: both are left out.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch


class Part(StrEnum):
    """Says what a storage is for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    EXCHANGE = "exchange"
    OTHER = "other"


@dataclass(frozen=True)
class Peak:
    """Holds the bytes of each part at the moment when there were most, and where that was."""

    parts: dict[Part, int]
    site: str

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts.values())


class Ledger:
    """Keeps the books of one device's storages."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, Part, weakref.ref[torch.UntypedStorage]]] = {}
        self._bytes = dict.fromkeys(Part, 0)
        self._total = 0
        self._peak = Peak(dict(self._bytes), "the start")

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Say whether the storage is counted already."""
        return storage._cdata in self._live

    def add(self, storage: torch.UntypedStorage, part: Part, site: str) -> None:
        """Count a new storage until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        self._live[key] = size, part, weakref.ref(storage, partial(self._free, key))
        self._grow(part, size, site)

    def resize(self, storage: torch.UntypedStorage, site: str) -> None:
        """Count a storage anew whose size was changed in place, as recomputation frees what it will make again."""
        if storage._cdata in self._live:
            size, part, reference = self._live[storage._cdata]
            self._live[storage._cdata] = storage.nbytes(), part, reference
            self._grow(part, storage.nbytes() - size, site)

    def label(self, storage: torch.UntypedStorage, part: Part) -> None:
        """Say what a storage is for that was counted as something else."""
        if storage._cdata in self._live:
            size, before, reference = self._live[storage._cdata]
            self._live[storage._cdata] = size, part, reference
            self._bytes[before] -= size
            self._bytes[part] += size

    def label_all(self, part: Part, kept: tuple[Part, ...]) -> None:
        """Say of everything that lives, but for what is one of the parts `kept`, what it is for."""
        for _, before, reference in list(self._live.values()):
            storage = reference()
            if storage is not None and before not in kept:
                self.label(storage, part)

    def transient(self, size: int, part: Part, site: str) -> None:
        """Count bytes that a kernel takes and gives back within one operator."""
        self._grow(part, size, site)
        self._bytes[part] -= size
        self._total -= size

    def reset_peak(self) -> None:
        """Begin to look for a peak anew, from what lives now."""
        self._peak = Peak(dict(self._bytes), "the start")

    @property
    def bytes(self) -> dict[Part, int]:
        """The bytes of each part that live now."""
        return dict(self._bytes)

    @property
    def peak(self) -> Peak:
        """The most bytes since the start, or since `reset_peak`."""
        return self._peak

    def _grow(self, part: Part, size: int, site: str) -> None:
        self._bytes[part] += size
        self._total += size
        if self._total > self._peak.total:
            self._peak = Peak(dict(self._bytes), site)

    def _free(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        size, part, _ = self._live.pop(key)
        self._bytes[part] -= size
        self._total -= size
