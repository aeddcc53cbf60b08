"""When a run is to stop early: its validation loss has not become lower for a while."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config import Config
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


def early_stopping(config: Config, run: Path | None, step: int) -> EarlyStopping:
    """Take up the count where a run's folder leaves it after `step` steps, of validations as they are to come.

    Args:
        config: the run's. Validations that it would do otherwise, such as inside documents, do not count.
        run: its folder; None for a run that begins, or that continues another one in a folder of its own.
        step: completed steps; what the folder has of later ones is left out.

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
    """Tell whether a validation was of as many tokens, windows and documents; what a record does not say is alike."""
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
