"""Judge each step of a run: loss spikes and numbers that are not finite, and whether training goes on.

With `--on-spike skip` or `--on-non-finite skip` such a step leaves the weights and the optimizer's state unchanged: the
host reads each step's loss and gradient norm before the update, and waits for them. `tools/inspect_step.py` prints the
rows of any step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.config import Config
from megatron_ext.engine.step import DivergedError, StepResult
from megatron_ext.monitoring.metrics import METRICS_FILE, read_by_step, recorded_number
from megatron_ext.monitoring.spikes import SpikeWatch
from megatron_ext.run.records import FinishedStep, RunRecords

SPIKE = "loss spike"


@dataclass(frozen=True)
class Cause:
    """Says what is wrong with a step.

    Attributes:
        what: `SPIKE`, or what is not finite.
        value: the loss or norm.
        bound: that it exceeds; None where it is not finite.
    """

    what: str
    value: float
    bound: float | None = None

    @property
    def needs(self) -> str:
        """Say what the value should have been."""
        return "a finite number" if self.bound is None else f"at most {self.bound:.4f}"


@dataclass(frozen=True)
class Past:
    """Says how the steps before a run's first one went, so that a continued run judges as one that never stopped.

    Attributes:
        losses: of steps with trained tokens, the latest last.
        skips: steps that were refused one after another, up to the last.
    """

    losses: tuple[float, ...] = ()
    skips: int = 0


def past(run: Path, step: int, count: int) -> Past:
    """Read the steps before one, and of their losses at most the last `count`; nothing where there are no metrics.

    Raises:
        UserError: a line of its metrics is damaged.
        OSError: they cannot be read.
    """
    path = run / METRICS_FILE
    before = read_by_step(path, ("lm_loss", "denominator", "skipped")) if path.exists() else ()
    records = [record for record in before if record["step"] < step]
    trained = [record for record in records if record.get("denominator") != 0]
    losses = [recorded_number(path, record, "lm_loss", record.get("lm_loss", "nothing")) for record in trained]
    went_on = (
        number
        for number, record in enumerate(reversed(records))
        if not record.get("skipped") or record.get("denominator") == 0
    )
    finite = [loss for loss in losses if loss is not None]
    return Past(tuple(finite[-count:]) if count else (), next(went_on, len(records)))


class Incidents:
    """Judges each step of a run, the same on every process, and does what the configuration says.

    Args:
        config: the run's.
        before: the steps before the run's first.
        records: where each incident gets a line.
    """

    def __init__(
        self,
        config: Config,
        before: Past,
        records: RunRecords,
    ) -> None:
        self.config, self.options = config, config.training
        self.records = records
        self.watch = SpikeWatch(self.options.spike_window, self.options.spike_deviations, before.losses)
        self._skips = before.skips

    @property
    def may_skip(self) -> bool:
        """Whether the host has to know a step's loss before the update."""
        return "skip" in (self.options.on_spike, self.options.on_non_finite)

    def accepts(self, result: StepResult) -> bool:
        """Tell whether a step may change the weights, after all steps before it have been recorded."""
        cause = self._cause(result)
        return cause is None or self._action(cause) != "skip"

    def landed(self, done: FinishedStep) -> tuple[FinishedStep, DivergedError | None]:
        """Judge a finished step, and note in a line what is wrong with it.

        Returns:
            The step, marked where it was a spike, and what ends the run, or None.
        """
        result = done.result
        cause = self._cause(result)
        if not result.without_tokens:
            self.watch.note(result.loss.lm_loss)
        if cause is None:
            self._skips = 0
            return done, None
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
        return replace(done, spike=cause.what == SPIKE), ends

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
