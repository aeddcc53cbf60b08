"""Detect loss spikes and non-finite values in each step, and decide whether training continues.

With `--on-spike skip` or `--on-non-finite skip` such a step leaves the weights and the optimizer's state unchanged: the
host waits for each step's loss and gradient norm before the update. `tools/inspect_step.py` prints the rows of any
step.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_ext.config import Config
from megatron_ext.engine.step import StepResult
from megatron_ext.errors import DivergedError
from megatron_ext.run.records import RunRecords, StepRecord

SPIKE = "loss spike"
_CONSEQUENCES = {
    "continue": "training continues",
    "skip": "the step is skipped, no weight changed",
    "stop": "the run ends",
}
_ROUNDING = 1e-6  # relative to the mean: a constant loss has no standard deviation


def spike_bound(losses: Sequence[float], window: int, deviations: float) -> float | None:
    """Return the bound above which the next loss is a spike: mean + deviations * std of the last `window` losses.

    This is OLMo 2's rule (arXiv 2501.00656), with the population's standard deviation. Before there are `window`
    losses, and with a window of 0, nothing is a spike. Spikes are included in the window, so a loss that stays high
    soon becomes the expected value.
    """
    if not window or len(losses) < window:
        return None
    last = np.array(losses)
    mean = float(last.mean())
    return mean + deviations * max(float(last.std()), _ROUNDING * abs(mean))


class Incidents:
    """Checks each step of a run, the same on every process, and applies the configured reaction.

    `state` is the `state_dict` of the run that is resumed; {} for a new run.
    """

    def __init__(self, config: Config, records: RunRecords, state: Mapping[str, Any]) -> None:
        self.options, self.records = config.training, records
        self.may_skip = "skip" in (self.options.on_spike, self.options.on_non_finite)
        self.losses = deque(state.get("loss_history", ()), self.options.spike_window)  # finite ones, the latest last
        self._skips = state.get("skips", 0)

    def accepts(self, result: StepResult) -> bool:
        """Return whether a step may change the weights, after all earlier steps have been recorded."""
        return self._check(result)[1] != "skip"

    def after_step(self, done: StepRecord) -> None:
        """Check a step, mark a loss spike, and record any incident.

        Raises:
            DivergedError: the run ends with this step.
        """
        result = done.result
        incident, action = self._check(result)
        if not result.without_tokens and math.isfinite(result.lm_loss):
            self.losses.append(result.lm_loss)
        self._skips = self._skips + 1 if result.refused else 0
        if incident is None:
            return
        if action == "skip" and self._skips >= self.options.skip_limit:
            action = "stop"
        self.records.note(
            f"the {incident.what} of step {done.step} is {incident.value:.4f}, needs {incident.needs}; "
            f"{_CONSEQUENCES[action]}"
        )
        done.spike = int(incident.what == SPIKE)
        if action == "stop" and result.refused:
            needs = f"{incident.needs} in one of skip_limit {self.options.skip_limit} steps, which were skipped"
            raise DivergedError(incident.what, incident.value, needs)
        if action == "stop":
            raise incident

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs for identical decisions, as JSON types."""
        return {"loss_history": list(self.losses), "skips": self._skips}

    def _check(self, result: StepResult) -> tuple[DivergedError | None, str]:
        """Return the non-finite value or the spike of a step, if any, and what to do."""
        options = self.options
        if result.without_tokens:
            return None, "continue"
        if (divergence := result.divergence()) is not None:
            return divergence, options.on_non_finite
        bound = spike_bound(self.losses, options.spike_window, options.spike_deviations)
        if bound is not None and result.lm_loss > bound:
            return DivergedError(SPIKE, result.lm_loss, f"at most {bound:.4f}"), options.on_spike
        return None, "continue"
