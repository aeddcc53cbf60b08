"""Validate inside a run: when it is due, over which rows, at which context lengths.

SkyLadder measures perplexity on validation documents in a window that slides (`--eval-stride`), by the same mask for
every run that is compared: whatever a run trains with, --eval-document-mask alone keeps it inside documents.
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
    """Validates where that is due; every process calls every method.

    Args:
        config: the run's.
        stepper: computes the losses.
        batches: makes the batches.
        row_at: a validation row by its index; None where the run never validates.
        records: takes the results.
        early: takes the losses, those before the run's first step among them, and says when they are enough.
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
        """Say whether a run validates after this many steps."""
        interval = self.training.eval_interval
        return bool(interval) and (step % interval == 0 or step == self.training.train_iters)

    def before_training(self, step: int, request: StopRequest, continued: Path | None) -> int:
        """Validate before the first step, or after `step` ones where the run has been stopped before it did.

        Args:
            step: completed steps.
            request: as in `after_step`. Before the first step it waits: there is nothing to continue from yet.
            continued: the run's folder, where it goes on in its own.

        Returns:
            As `after_step`, and raises as it does.
        """
        if step == 0:
            return self.after_step(step, None)
        if continued is None:
            return 0
        recorded = [self.stepper.ranks.world == 0 and evaluated(continued, step)]
        dist.broadcast_object_list(recorded, src=0)
        return 0 if recorded[0] else self.after_step(step, request)

    def after_step(self, step: int, request: StopRequest | None) -> int:
        """Validate, if that is due after `step` steps.

        Returns:
            The signal that has cut it short, which then leaves no record; 0 otherwise.

        Raises:
            DivergedError: a loss is not finite; all processes raise it, and there is no record of it either.
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
                # the signal reached one process, all must leave this loop together
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
