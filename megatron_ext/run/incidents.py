"""Detect loss spikes and non-finite values in each step, and decide whether training continues.

With `--on-spike skip` or `--on-non-finite skip` such a step leaves the weights and the optimizer's state unchanged: the
host waits for each step's loss and gradient norm before the update. `tools/inspect_step.py` prints the rows of any
step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_ext.config import Config
from megatron_ext.engine.step import StepResult
from megatron_ext.errors import DivergedError
from megatron_ext.run.records import RunRecords, StepRecord

_ROUNDING = 1e-6  # relative to the mean: a constant loss has no standard deviation


class SpikeWatch:
    """Keeps the finite losses of the last `window` steps; a loss above mean + deviations * std of them is a spike.

    This is OLMo 2's rule (arXiv 2501.00656), with the population's standard deviation. Before there are `window`
    losses, nothing is a spike; with a window of 0, nothing ever is. Spikes are included in the window, so a loss that
    stays high soon becomes the expected value.
    """

    def __init__(self, window: int, deviations: float) -> None:
        self.window, self.deviations = window, deviations
        self.losses: deque[float] = deque(maxlen=window)  # the latest last

    def bound(self) -> float | None:
        """Return the bound above which the next loss is a spike; None if fewer than `window` losses are known."""
        if not self.window or len(self.losses) < self.window:
            return None
        losses = np.array(self.losses)
        mean = float(losses.mean())
        return mean + self.deviations * max(float(losses.std()), _ROUNDING * abs(mean))

    def note(self, loss: float) -> None:
        """Add a step's loss; non-finite losses are ignored."""
        if math.isfinite(loss):
            self.losses.append(loss)


SPIKE = "loss spike"
_CONSEQUENCES = {
    "continue": "training continues",
    "skip": "the step is skipped, no weight changed",
    "stop": "the run ends",
}


class Incidents:
    """Checks each step of a run, the same on every process, and applies the configured reaction."""

    def __init__(self, config: Config, records: RunRecords) -> None:
        self.options, self.records = config.training, records
        self.watch = SpikeWatch(self.options.spike_window, self.options.spike_deviations)
        self.may_skip = "skip" in (self.options.on_spike, self.options.on_non_finite)
        self._skips = 0

    def accepts(self, result: StepResult) -> bool:
        """Return whether a step may change the weights, after all earlier steps have been recorded."""
        incident = self._incident(result)
        return incident is None or self._action(incident) != "skip"

    def after_step(self, done: StepRecord) -> None:
        """Check a step, mark a loss spike, and record any incident.

        Raises:
            DivergedError: the run ends with this step.
        """
        result = done.result
        incident = self._incident(result)
        if not result.without_tokens:
            self.watch.note(result.lm_loss)
        if incident is None:
            self._skips = 0
            return
        action, ends = self._action(incident), incident
        self._skips = self._skips + 1 if result.refused else 0
        if action == "skip" and self._skips >= self.options.skip_limit:
            action = "stop"
            needs = f"{incident.needs} in one of skip_limit {self.options.skip_limit} steps, which were skipped"
            ends = DivergedError(incident.what, incident.value, needs)
        self.records.note(
            f"the {incident.what} of step {done.step} is {incident.value:.4f}, needs {incident.needs}; "
            f"{_CONSEQUENCES[action]}"
        )
        done.spike = incident.what == SPIKE
        if action == "stop":
            raise ends

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs for identical decisions, as JSON types."""
        return {"loss_history": list(self.watch.losses), "skips": self._skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; {} is the initial state."""
        self.watch.losses.extend(state.get("loss_history", ()))
        self._skips = state.get("skips", 0)

    def _incident(self, result: StepResult) -> DivergedError | None:
        """Return the non-finite value or the spike of a step; None if there is neither."""
        if result.without_tokens:
            return None
        bound, loss = self.watch.bound(), result.lm_loss
        if bound is not None and loss > bound and result.divergence() is None:
            return DivergedError(SPIKE, loss, f"at most {bound:.4f}")
        return result.divergence()

    def _action(self, incident: DivergedError) -> str:
        return self.options.on_spike if incident.what == SPIKE else self.options.on_non_finite
