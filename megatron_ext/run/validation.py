"""Validate: when, on which rows, and at which context lengths; lm-eval's tasks; early stopping."""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext import heartbeat
from megatron_ext.config import Config, TrainingConfig
from megatron_ext.data.row import RowSource
from megatron_ext.engine import agreement
from megatron_ext.engine.step import Stepper
from megatron_ext.errors import DivergedError
from megatron_ext.evaluation.by_position import BINS, losses_by_position, mean_loss
from megatron_ext.files.reading import JsonObject
from megatron_ext.monitoring.metrics import EVALUATION_FILE, read_by_step
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.callbacks import Losses, RunRecords
from megatron_ext.run.lm_eval import LmEval
from megatron_ext.run.signals import StopRequest, signal_of


@dataclass
class Validation:
    """Runs validations when due; every process calls every method.

    SkyLadder measures perplexity on validation documents in a sliding window (`--eval-stride`), with the same mask for
    all compared runs: independent of the training mask, only --eval-document-mask keeps attention inside documents.
    """

    config: Config
    stepper: Stepper
    batches: BatchMaker
    rows: RowSource | None  # None if the run never validates
    records: RunRecords
    lm_eval: LmEval | None  # None if the run never runs it
    setting: str  # of `validation_setting`; "" if the run never validates
    # since the run began, also before it was resumed: the losses of validations with this setting, and the steps after
    # which it validated with any setting and ran lm-eval
    losses: Losses = field(default_factory=dict)
    validated: set[int] = field(default_factory=set)
    scored: set[int] = field(default_factory=set)

    def recall(self, run: Path, step: int) -> None:
        """Read what a resumed run has evaluated after at most `step` steps. Collective."""
        self.losses, self.validated, self.scored = agreement.run_on_rank0(
            lambda: (read_losses(run, step, self.setting), read_validated(run, step), read_scored(run, step)),
            run,
            reads=True,
        )
        other_settings = len(self.validated) - len(self.losses)
        if self.config.training.early_stopping_patience and other_settings:
            self.records.note(
                f"early stopping counts anew: {other_settings} earlier validations measured something else"
            )

    @property
    def stop_reason(self) -> str | None:
        return stop_reason(self.losses, self.config.training)

    def is_due(self, step: int) -> bool:
        """Return whether a run validates, or runs lm-eval, after this many steps."""
        training = self.config.training
        return is_due(training.eval_interval, step, training) or is_due(training.lm_eval_interval, step, training)

    def runs_lm_eval(self, step: int) -> bool:
        """Return whether a run runs lm-eval after this many steps, which no signal interrupts."""
        return is_due(self.config.training.lm_eval_interval, step, self.config.training) and step not in self.scored

    def run_if_due(self, step: int, request: StopRequest | None) -> int:
        """Validate if this is due after `step` completed steps, then run lm-eval if this is due.

        A signal recorded in `request` interrupts the validation; with None it does not.

        Returns:
            The signal that interrupted the validation, which then has no record; 0 otherwise.

        Raises:
            DivergedError: a loss is not finite; raised on all processes, without a record.
            UserError: lm-eval cannot run a task.
        """
        training = self.config.training
        if is_due(training.eval_interval, step, training) and step not in self.validated:
            received = self._validate(step, request)
            if received:
                return received
        if self.runs_lm_eval(step):
            self.run_lm_eval(step)
        return 0

    def run_lm_eval(self, step: int) -> None:
        """Run lm-eval after `step` completed steps, unless the run never runs it, or has done so after this step.

        Raises:
            UserError: lm-eval cannot run a task.
        """
        if self.lm_eval is not None and step not in self.scored:
            self.records.lm_eval(step, self.lm_eval.scores(step))
            self.scored.add(step)

    def _validate(self, step: int, request: StopRequest | None) -> int:
        assert self.rows is not None
        training = self.config.training
        data = self.config.data
        lengths = sorted(training.eval_lengths or (data.seq_length,))
        trained_window = self.config.window_schedule().window_at(max(step - 1, 0))
        sums = {length: torch.zeros(2, BINS, dtype=torch.float64) for length in lengths}
        for length, number in itertools.product(lengths, range(training.eval_iters)):
            heartbeat.beat(f"validating after {step} steps")
            if request is not None:
                # a signal may reach only one process, but all must leave this loop together
                received = torch.tensor(request.priority, device=self.stepper.platform.device)
                dist.all_reduce(received, dist.ReduceOp.MAX)
                if received:
                    return signal_of(int(received))
            batches = self.batches.evaluate(self.rows.row, number * data.global_batch_size, length, trained_window)
            sums[length] += self.stepper.evaluate(batches)
        losses = {length: mean_loss(at) for length, at in sums.items()}
        for loss in losses.values():
            if loss is not None and not math.isfinite(loss):
                raise DivergedError("validation loss", loss)
        longest = lengths[-1]
        self.records.evaluation(step, losses, losses_by_position(sums[longest]), self.setting)
        self.losses[step] = losses[longest]
        self.validated.add(step)
        return 0


def is_due(interval: int, step: int, training: TrainingConfig) -> bool:
    """Return whether `step` is a multiple of `interval` or the last step of the run; never with an interval of 0."""
    return interval > 0 and (step % interval == 0 or step == training.train_iters)


def read_losses(run: Path | str | None, step: int, setting: str | None = None) -> Losses:
    """Read the losses of a run's validations after at most `step` steps; {} without a folder.

    Losses are comparable if their validations have the same `setting`: the given one, or the last validation's. They
    are not in a checkpoint, which is saved before the validation of the same step.
    """
    records = _read("valid_loss", run, step)
    if records and setting is None:
        setting = records[max(records)].get("setting")
    return {after: record["valid_loss"] for after, record in records.items() if record.get("setting") == setting}


def read_validated(run: Path | str | None, step: int) -> set[int]:
    """Read the steps after which a run has validated, with any setting, as `read_losses`."""
    return set(_read("valid_loss", run, step))


def read_scored(run: Path | str | None, step: int) -> set[int]:
    """Read the steps after which a run has run lm-eval, as `read_losses`."""
    return set(_read("lm_eval", run, step))


def _read(key: str, run: Path | str | None, step: int) -> dict[int, JsonObject]:
    records = {} if run is None else read_by_step(Path(run) / EVALUATION_FILE)
    return {after: record for after, record in records.items() if after <= step and key in record}


def stop_reason(losses: Losses, training: TrainingConfig) -> str | None:
    """Return why a run stops early: its last `early_stopping_patience` losses have not improved; None if it continues.

        delta 0.1    loss      4.0   3.5   3.45  3.6   3.3
                     lowest    4.0   3.5   3.5   3.5   3.3    3.45 is not lower by more than delta
                     without    0     0     1     2     0

    A loss improves on the lowest one if it is lower by more than `early_stopping_delta`, in nats. A patience of 0
    disables early stopping.
    """
    lowest = math.inf
    lowest_step = 0
    without = 0
    for step, loss in losses.items():
        if loss is None:
            continue
        without += 1
        if loss < lowest - training.early_stopping_delta:
            lowest = loss
            lowest_step = step
            without = 0
    if not training.early_stopping_patience or without < training.early_stopping_patience:
        return None
    return (
        f"stopped early: the validation loss was lowest after {lowest_step} steps, {lowest:.4f}, and the "
        f"{without} validations since were not lower by more than {training.early_stopping_delta:g}"
    )
