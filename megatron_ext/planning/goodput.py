"""Estimate how often a run should save, and the fraction of its time that is progress, given failures.

Failures occur at a constant rate, M seconds apart on average for the whole job. A save stops training for d seconds, a
restart takes R. With tau seconds of work between saves, T seconds of work take (Daly, Future Generation Computer
Systems 22, 2006, equation 20)

    M e^(R/M) (e^((tau + d)/M) - 1) T / tau,

which is smallest at about tau = sqrt(2 d M) (Young, Communications of the ACM 17, 1974).
"""

from __future__ import annotations

import math

GPU_HOURS_PER_FAILURE = 50_676  # arXiv 2407.21783, 3.3.4: 419 unexpected interruptions of 16,384 H100 in 54 days
SAVE_SECONDS = 10.0  # assumed: fixed cost of a save, without writing its bytes (plan, barrier, manifest)
RESTART_SECONDS = 600.0  # assumed: detecting the failure, starting the processes, reading the checkpoint


def young_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return approximately the best seconds of work between two saves: sqrt(2 d M)."""
    return math.sqrt(2 * save_seconds * failure_seconds)


def daly_slowdown(interval: float, save_seconds: float, restart_seconds: float, failure_seconds: float) -> float:
    """Return the expected time of a run over its time without saves and failures; inf if it makes no progress."""
    try:
        cycle = math.expm1((interval + save_seconds) / failure_seconds)
        return failure_seconds * math.exp(restart_seconds / failure_seconds) * cycle / interval
    except OverflowError:
        return math.inf
