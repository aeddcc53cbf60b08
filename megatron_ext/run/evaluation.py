"""Validate during a run: when, on which rows, and at which context lengths.

SkyLadder measures perplexity on validation documents in a sliding window (`--eval-stride`), with the same mask for all
compared runs: independent of the training mask, only --eval-document-mask keeps attention inside documents.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext import heartbeat
from megatron_ext.config import Config
from megatron_ext.engine.step import DivergedError, Stepper
from megatron_ext.evaluation.by_position import PositionLosses
from megatron_ext.monitoring.early_stopping import EarlyStopping
from megatron_ext.monitoring.metrics import evaluated
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.records import RunRecords
from megatron_ext.run.rows import RowAt
from megatron_ext.run.signals import VALIDATION_LOSS, StopRequest


class Validation:
    """Runs validations when due; every process calls every method.

    Args:
        config: the run's.
        stepper: computes the losses.
        batches: makes the batches.
        row_at: returns a validation row by its index; None if the run never validates.
        records: records the results.
        early: receives the losses, including those before the first step, and decides when the run stops early.
    """

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        batches: BatchMaker,
        row_at: RowAt | None,
        records: RunRecords,
        early: EarlyStopping,
    ) -> None:
        self.training, self.data = config.training, config.data
        self.window = config.window_schedule()
        self.stepper, self.batches, self.row_at, self.records = stepper, batches, row_at, records
        self.early = early

    def is_due(self, step: int) -> bool:
        """Return whether a run validates after this many steps."""
        interval = self.training.eval_interval
        return bool(interval) and (step % interval == 0 or step == self.training.train_iters)

    def before_training(self, step: int, request: StopRequest, continued: Path | None) -> int:
        """Validate before the first step, or after `step` steps if the run was stopped before that validation.

        Args:
            step: completed steps.
            request: as in `after_step`. Before the first step signals are deferred: there is no checkpoint to continue
                from.
            continued: the run's folder, if the run resumes in it.

        Returns:
            As `after_step`, with the same exceptions.
        """
        if step == 0:
            return self.after_step(step, None)
        if continued is None:
            return 0
        recorded = [self.stepper.ranks.world == 0 and evaluated(continued, step)]
        dist.broadcast_object_list(recorded, src=0)
        return 0 if recorded[0] else self.after_step(step, request)

    def after_step(self, step: int, request: StopRequest | None) -> int:
        """Validate if it is due after `step` steps.

        Returns:
            The signal that interrupted the validation, which then has no record; 0 otherwise.

        Raises:
            DivergedError: a loss is not finite; raised on all processes, without a record.
        """
        if not self.is_due(step):
            return 0
        assert self.row_at is not None
        lengths = sorted(self.training.eval_lengths or (self.data.seq_length,))
        trained_window = self.window.window_at(max(step - 1, 0))
        losses: dict[int, list[PositionLosses]] = {length: [] for length in lengths}
        for length, number in itertools.product(lengths, range(self.training.eval_iters)):
            heartbeat.beat(f"validating after {step} steps")
            if request is not None:
                # a signal may reach only one process, but all must leave this loop together
                asked = torch.tensor(request.asked, device=self.stepper.platform.device)
                dist.all_reduce(asked, dist.ReduceOp.MAX)
                if asked:
                    return int(asked)
            first_sample = number * self.data.global_batch_size
            batches = self.batches.evaluate(self.row_at, first_sample, length, trained_window)
            losses[length].append(self.stepper.evaluate(batches))
        sums = {length: functools.reduce(operator.add, parts) for length, parts in losses.items()}
        for at_length in sums.values():
            if at_length.lm_loss is not None and not math.isfinite(at_length.lm_loss):
                raise DivergedError(VALIDATION_LOSS, at_length.lm_loss)
        self.records.evaluation(step, sums)
        self.early.note(step, sums[max(sums)].lm_loss)
        return 0
