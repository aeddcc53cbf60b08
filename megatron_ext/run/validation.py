"""Validate during a run: when, on which rows, and at which context lengths.

SkyLadder measures perplexity on validation documents in a sliding window (`--eval-stride`), with the same mask for all
compared runs: independent of the training mask, only --eval-document-mask keeps attention inside documents.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist

from megatron_ext import heartbeat
from megatron_ext.config import Config
from megatron_ext.engine.step import Stepper
from megatron_ext.errors import DivergedError
from megatron_ext.evaluation.by_position import BINS, mean_loss
from megatron_ext.monitoring.early_stopping import EarlyStopping
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.inputs import RowAt
from megatron_ext.run.records import RunRecords
from megatron_ext.run.signals import VALIDATION_LOSS, StopRequest


class Validation:
    """Runs validations when due; every process calls every method. `row_at` is None if the run never validates."""

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        batches: BatchMaker,
        row_at: RowAt | None,
        records: RunRecords,
        early: EarlyStopping,
    ) -> None:
        self.config, self.training, self.window = config, config.training, config.window_schedule()
        self.stepper, self.batches, self.row_at, self.records, self.early = stepper, batches, row_at, records, early

    def is_due(self, step: int) -> bool:
        """Return whether a run validates after this many steps."""
        interval = self.training.eval_interval
        return bool(interval) and (step % interval == 0 or step == self.training.train_iters)

    def after_step(self, step: int, request: StopRequest | None) -> int:
        """Validate if it is due after `step` completed steps, until a signal interrupts it; None: signals are deferred.

        Returns:
            The signal that interrupted the validation, which then has no record; 0 otherwise.

        Raises:
            DivergedError: a loss is not finite; raised on all processes, without a record.
        """
        if not self.is_due(step):
            return 0
        assert self.row_at is not None
        lengths = sorted(self.training.eval_lengths or (self.config.data.seq_length,))
        trained_window = self.window.window_at(max(step - 1, 0))
        sums = {length: torch.zeros(2, BINS, dtype=torch.float64) for length in lengths}
        for length, number in itertools.product(lengths, range(self.training.eval_iters)):
            heartbeat.beat(f"validating after {step} steps")
            if request is not None:
                # a signal may reach only one process, but all must leave this loop together
                received = torch.tensor(request.signal, device=self.stepper.platform.device)
                dist.all_reduce(received, dist.ReduceOp.MAX)
                if received:
                    return int(received)
            first_sample = number * self.config.data.global_batch_size
            batches = self.batches.evaluate(self.row_at, first_sample, length, trained_window)
            sums[length] += self.stepper.evaluate(batches)
        for at_length in sums.values():
            loss = mean_loss(at_length)
            if loss is not None and not math.isfinite(loss):
                raise DivergedError(VALIDATION_LOSS, loss)
        self.records.evaluation(step, sums)
        self.early.note(step, mean_loss(sums[max(sums)]))
        return 0
