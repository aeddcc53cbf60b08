"""Detect loss spikes and non-finite values in each step, and decide whether training continues.

With `--on-spike skip` or `--on-non-finite skip` such a step leaves the weights and the optimizer's state unchanged: the
host waits for each step's loss and gradient norm before the update. `tools/inspect_step.py` prints the rows of any
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config import Config
from megatron_ext.engine.step import DivergedError, StepResult
from megatron_ext.monitoring.spikes import SpikeWatch
from megatron_ext.run.records import RunRecords, StepRecord

SPIKE = "loss spike"


@dataclass(frozen=True)
class Cause:
    """Describes an incident.

    Attributes:
        what: `SPIKE`, or the name of the non-finite value.
        value: the loss or norm.
        bound: the exceeded bound; None if the value is not finite.
    """

    what: str
    value: float
    bound: float | None = None

    @property
    def needs(self) -> str:
        """Return the requirement that the value violates, as text."""
        return "a finite number" if self.bound is None else f"at most {self.bound:.4f}"


class Incidents:
    """Checks each step of a run, the same on every process, and applies the configured reaction.

    Args:
        config: the run's.
        records: records each incident as a line.
    """

    def __init__(
        self,
        config: Config,
        records: RunRecords,
    ) -> None:
        self.config, self.options = config, config.training
        self.records = records
        self.watch = SpikeWatch(self.options.spike_window, self.options.spike_deviations)
        self._skips = 0

    @property
    def may_skip(self) -> bool:
        """Whether the host needs a step's loss before the update."""
        return "skip" in (self.options.on_spike, self.options.on_non_finite)

    def accepts(self, result: StepResult) -> bool:
        """Return whether a step may change the weights, after all earlier steps have been recorded."""
        cause = self._cause(result)
        return cause is None or self._action(cause) != "skip"

    def after_step(self, done: StepRecord) -> None:
        """Check a step, mark a loss spike, and record any incident.

        Raises:
            DivergedError: the run ends with this step.
        """
        result = done.result
        cause = self._cause(result)
        if not result.without_tokens:
            self.watch.note(result.loss.lm_loss)
        if cause is None:
            self._skips = 0
            return
        action = self._action(cause)
        self._skips = self._skips + 1 if result.refused else 0
        what, limit = f"the {cause.what} of step {done.step} is {cause.value:.4f}", self.options.skip_limit
        ends = None
        if action == "stop":
            ends = DivergedError(cause.what, cause.value, cause.needs)
        elif self._skips >= limit:
            action = "stop"
            within = f"{cause.needs} in one of skip_limit {limit} steps, which were skipped"
            ends = DivergedError(cause.what, cause.value, within)
        self.records.note(f"{what}, needs {cause.needs}; {_SAID[action]}")
        done.spike = cause.what == SPIKE
        if ends is not None:
            raise ends

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs for identical decisions, as JSON types."""
        return {"loss_history": self.watch.losses, "skips": self._skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; {} is the initial state."""
        for loss in state.get("loss_history", ()):
            self.watch.note(loss)
        self._skips = state.get("skips", 0)

    def _cause(self, result: StepResult) -> Cause | None:
        if result.without_tokens:
            return None
        divergence = result.divergence()
        if divergence is not None:
            return Cause(divergence.what, divergence.value)
        expected, loss = self.watch.expected(), result.loss.lm_loss
        if expected is not None and loss > expected.bound:
            return Cause(SPIKE, loss, expected.bound)
        return None

    def _action(self, cause: Cause) -> str:
        return self.options.on_spike if cause.what == SPIKE else self.options.on_non_finite


_SAID = {"continue": "training goes on", "skip": "the step is skipped, no weight changed", "stop": "the run ends"}
