"""Early stopping: stop a run whose validation loss has not improved for a number of validations."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_ext.config import Config
from megatron_ext.monitoring.metrics import EVALUATION_FILE, read_by_step


class EarlyStopping:
    """Counts the validations since the lowest loss; training stops after `patience` of them.

        delta 0.1    loss      4.0   3.5   3.45  3.6   3.3
                     lowest    4.0   3.5   3.5   3.5   3.3    3.45 is not lower by more than delta
                     without    0     0     1     2     0

    A loss improves on the lowest one if it is lower by more than `delta`, in nats. A patience of 0 disables early
    stopping. `step` is that of the last validation, None before the first.
    """

    def __init__(self, patience: int, delta: float) -> None:
        self.patience, self.delta = patience, delta
        self.step: int | None = None
        self._lowest, self._at, self._without = math.inf, 0, 0

    def note(self, step: int, loss: float | None) -> None:
        """Record the loss of the validation after `step` steps; None (no trained tokens) is not counted."""
        self.step = step
        if loss is not None and loss < self._lowest - self.delta:
            self._lowest, self._at, self._without = loss, step, 0
        elif loss is not None:
            self._without += 1

    @property
    def reason(self) -> str | None:
        """Return why the run stops; None if it continues."""
        if not self.patience or self._without < self.patience:
            return None
        return (
            f"stopped early: the validation loss was lowest after {self._at} steps, {self._lowest:.4f}, and the "
            f"{self._without} validations since were not lower by more than {self.delta:g}"
        )


def early_stopping(config: Config, run: Path | None, step: int) -> EarlyStopping:
    """Restore the count of a run after `step` steps from its validations, which are later than its checkpoints.

    A checkpoint is saved before the validation of the same step, so it does not contain that validation's loss. `run`
    is the run's folder; None for a new run, or one that continues another run in a folder of its own.
    """
    counted = EarlyStopping(config.training.early_stopping_patience, config.training.early_stopping_delta)
    if run is not None and (run / EVALUATION_FILE).exists():
        for record in read_by_step(run / EVALUATION_FILE):
            if record["step"] <= step:
                counted.note(record["step"], record["valid_loss"])
    return counted
