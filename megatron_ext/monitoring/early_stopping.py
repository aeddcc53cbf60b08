"""When a run is to stop early: its validation loss has not become lower for a while."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from megatron_ext.config import TrainingConfig
from megatron_ext.monitoring.metrics import EVALUATION_FILE, read_by_step, recorded_number

STOPPED_EARLY = "stopped early"


class EarlyStopping:
    """Counts the validations since the lowest loss; `patience` of them are enough.

        delta 0.1    loss      4.0   3.5   3.45  3.6   3.3
                     lowest    4.0   3.5   3.5   3.5   3.3    3.45 is not lower by more than delta
                     without    0     0     1     2     0

    It is a function of the losses alone, in their order: a resumed run that reads them from its folder comes to the
    same count, and so do all processes.

    Args:
        patience: validations without improvement after which the run stops; 0: it never does.
        delta: in nats; a loss improves on the lowest one where it is lower by more.
        evaluations: step and loss of the validations so far, by increasing step.
    """

    def __init__(self, patience: int, delta: float, evaluations: Iterable[tuple[int, float | None]] = ()) -> None:
        self.patience, self.delta = patience, delta
        self._lowest, self._at, self._without = math.inf, 0, 0
        for step, loss in evaluations:
            self.note(step, loss)

    def note(self, step: int, loss: float | None) -> None:
        """Take up the loss of the validation after `step` steps; one without trained tokens (None) counts as none."""
        if loss is None:
            return
        if loss < self._lowest - self.delta:
            self._lowest, self._at, self._without = loss, step, 0
        else:
            self._without += 1

    @property
    def reason(self) -> str | None:
        """Why the run stops, in words; None where it goes on."""
        if not self.patience or self._without < self.patience:
            return None
        return (
            f"{STOPPED_EARLY}: the validation loss was lowest after {self._at} steps, {self._lowest:.4f}, and the "
            f"{self._without} validations since were not lower by more than {self.delta:g}"
        )


def early_stopping(training: TrainingConfig, run: Path | None, step: int) -> EarlyStopping:
    """Take up the count where a run's folder leaves it after `step` steps.

    Args:
        training: the run's options.
        run: its folder; None for a run that begins, or that continues another one in a folder of its own.
        step: completed steps; what the folder has of later ones is left out.

    Raises:
        UserError: a line of its evaluations is damaged.
        OSError: they cannot be read.
    """
    path = None if run is None else run / EVALUATION_FILE
    patience, delta = training.early_stopping_patience, training.early_stopping_delta
    if not patience or path is None or not path.exists():
        return EarlyStopping(patience, delta)
    before = [record for record in read_by_step(path) if record["step"] <= step]
    losses = [recorded_number(path, record, "valid_loss", record.get("valid_loss", "nothing")) for record in before]
    return EarlyStopping(patience, delta, zip([record["step"] for record in before], losses, strict=True))
