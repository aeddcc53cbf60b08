"""Early stopping: stop a run whose validation loss has not improved for a number of validations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config import Config
from megatron_ext.monitoring.metrics import EVALUATION_FILE, read_by_step, recorded_number

STOPPED_EARLY = "stopped early"


class EarlyStopping:
    """Counts the validations since the lowest loss; training stops after `patience` of them.

        delta 0.1    loss      4.0   3.5   3.45  3.6   3.3
                     lowest    4.0   3.5   3.5   3.5   3.3    3.45 is not lower by more than delta
                     without    0     0     1     2     0

    The count is a function of the ordered losses only: a resumed run that reads them from its folder reaches the same
    count, and so do all processes.

    Args:
        patience: validations without improvement after which the run stops; 0 disables early stopping.
        delta: in nats; a loss improves on the lowest one if it is lower by more than this.
        evaluations: step and loss of the validations so far, by increasing step.
    """

    def __init__(self, patience: int, delta: float, evaluations: Iterable[tuple[int, float | None]] = ()) -> None:
        self.patience, self.delta = patience, delta
        self._lowest, self._at, self._without = math.inf, 0, 0
        for step, loss in evaluations:
            self.note(step, loss)

    def note(self, step: int, loss: float | None) -> None:
        """Record the loss of the validation after `step` steps; a loss without trained tokens (None) is not counted."""
        if loss is None:
            return
        if loss < self._lowest - self.delta:
            self._lowest, self._at, self._without = loss, step, 0
        else:
            self._without += 1

    @property
    def reason(self) -> str | None:
        """Return why the run stops; None if it continues."""
        if not self.patience or self._without < self.patience:
            return None
        return (
            f"{STOPPED_EARLY}: the validation loss was lowest after {self._at} steps, {self._lowest:.4f}, and the "
            f"{self._without} validations since were not lower by more than {self.delta:g}"
        )


def early_stopping(config: Config, run: Path | None, step: int) -> EarlyStopping:
    """Restore the count from a run's folder after `step` steps.

    Args:
        config: the run's. Validations with other settings, such as another document mask, do not count.
        run: the run's folder; None for a new run, or one that continues another run in a folder of its own.
        step: completed steps; later evaluations in the folder are ignored.

    Raises:
        UserError: a line of its evaluations is damaged.
        OSError: they cannot be read.
    """
    path = None if run is None else run / EVALUATION_FILE
    training = config.training
    patience, delta = training.early_stopping_patience, training.early_stopping_delta
    if not patience or path is None or not path.exists():
        return EarlyStopping(patience, delta)
    before = [record for record in read_by_step(path) if record["step"] <= step and _compares(record, config)]
    losses = [recorded_number(path, record, "valid_loss", record.get("valid_loss", "nothing")) for record in before]
    return EarlyStopping(patience, delta, zip([record["step"] for record in before], losses, strict=True))


def _compares(record: Mapping[str, Any], config: Config) -> bool:
    """Return whether a validation used the same tokens, windows and document mask; missing fields match."""
    training, data = config.training, config.data
    asked = {
        "tokens": training.eval_iters * data.global_batch_size * data.seq_length,
        "document_mask": training.eval_document_mask,
        "stride": training.eval_stride,
    }
    longest, by_length = str(max(training.eval_lengths or (data.seq_length,))), record.get("by_length")
    if isinstance(by_length, Mapping) and list(by_length)[-1:] != [longest]:
        return False
    return all(record.get(name, value) == value for name, value in asked.items())
