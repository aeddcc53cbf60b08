"""Layouts of processes, and how far two outcomes are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from runs import weight_error

from context_parallel.cases import Outcome, Parallel


@dataclass(frozen=True)
class Layout:
    name: str
    processes: int
    cp: int
    others: tuple[tuple[str, Any], ...] = ()

    @property
    def parallel(self) -> Parallel:
        """Fields of ParallelConfig."""
        return {"context_parallel_size": self.cp, **dict(self.others)}


_TP2, _PP2 = ("tensor_model_parallel_size", 2), ("pipeline_model_parallel_size", 2)
_SEQUENCE = ("sequence_parallel", True)
CP2, CP4 = Layout("cp2", 2, 2), Layout("cp4", 4, 4)
TP2, PP2, DP2 = Layout("tp2 sp", 2, 1, (_TP2, _SEQUENCE)), Layout("pp2", 2, 1, (_PP2,)), Layout("dp2", 2, 1)
CP2_TP2 = Layout("cp2 tp2 sp", 4, 2, (_TP2, _SEQUENCE))
CP2_PP2 = Layout("cp2 pp2", 4, 2, (_PP2,))
CP2_DP2 = Layout("cp2 dp2", 4, 2)


def relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """max |a - b| / |b|; what is 0 must be 0."""
    a, b = np.array(ours), np.array(theirs)
    assert np.isfinite(a).all()
    assert not a[b == 0].any()
    return float(np.max(np.abs(a - b) / np.where(b == 0, 1, np.abs(b))))


def errors(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    found = {
        name: relative(getattr(ours, name), getattr(theirs, name))
        for name in ("lm_loss", "train_loss", "grad_norm", "denominator")
    }
    found["valid_loss"] = relative([ours.valid_loss], [theirs.valid_loss])
    found["weights"] = weight_error(ours.weights, theirs.weights)[0]
    return found
