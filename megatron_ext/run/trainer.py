"""Run the training loop.

build (run/build.py): open the inputs -> join the processes -> build the model
Trainer: restore -> for each step: make_batches -> launch -> collect_results -> records; save and validate when due
"""

import gc
import logging
import resource
import shlex
import signal
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import heartbeat
from megatron_ext.batch import StepBatches
from megatron_ext.checkpoint.folders import older, step_of
from megatron_ext.cli import program
from megatron_ext.config import Config
from megatron_ext.config.arguments import as_flag
from megatron_ext.context_parallel.choice import cp_options
from megatron_ext.data.rows.blend import BlendedRows
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.device import AsyncHostCopy, to_device
from megatron_ext.engine import agreement, parallel
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, sync_params, wrap
from megatron_ext.engine.state import Checkpointer, Position
from megatron_ext.engine.step import PendingStep, Stepper
from megatron_ext.errors import DivergedError, UserError, first_line
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.build import Built, build, describe_run
from megatron_ext.run.callbacks import Incidents, RunInfo, RunRecords, StepRecord
from megatron_ext.run.identity import data_fingerprints
from megatron_ext.run.inputs import validation_setting
from megatron_ext.run.lm_eval import LmEval
from megatron_ext.run.signals import Ending, StopRequest, signal_of
from megatron_ext.run.trajectory import Trajectory
from megatron_ext.run.validation import Validation
from megatron_ext.run.watchdog import Watchdog

logger = logging.getLogger(__name__)


def train(config: Config, request: StopRequest, *, run: Path | None, has_next_stage: bool = False) -> Ending:
    """Run one configuration from its start, or from a checkpoint, to its last step or a signal.

    The process groups stay initialized, and `request` goes on recording signals, for the following stages.

    Args:
        run: the folder to pass to --load to continue; a stage's own folder is inside it.
        has_next_stage: another stage follows, which a signal during the last step must stop.

    Raises what `build` raises.
    """
    built = build(config)
    info = describe_run(config, built)
    request.listen()
    timeout_s = config.parallel.watchdog_timeout
    if timeout_s is None:
        timeout_s = 1800.0
        if built.ranks.world_size > 1:
            timeout_s = 0.9 * 60 * config.parallel.distributed_timeout_minutes
    with Watchdog(built.ranks.world, run_folder(config), timeout_s):
        ending = Trainer(config, built, info, request).fit(run, has_next_stage)
        parallel.finish_stage()
    return ending


def run_folder(config: Config) -> Path | None:
    """Return the folder of --save; None without it."""
    if config.checkpoint.save:
        return Path(config.checkpoint.save)
    return None


@dataclass(frozen=True, eq=False)
class InFlight:
    """A launched step, whose results are being copied to the host."""

    step: int
    pending: PendingStep
    results: AsyncHostCopy
    waiting_since: float  # when the host began to wait for its batches, by `time.perf_counter`
    data_wait_s: float
    save_stall_s: float
    checkpoints_begun: int  # at its launch, by `Checkpointer.begun`


class Trainer:
    """Trains one rank's part of a model; after construction the model is at the run's start or resumed position.

    On CUDA, a step's results are copied to the host while the next step runs, and recorded after the copy.
    """

    def __init__(self, config: Config, built: Built, info: RunInfo, request: StopRequest) -> None:
        inputs = built.inputs
        ranks = built.ranks
        self.config = config
        self.platform = built.platform
        self.ranks = ranks
        self.inputs = inputs
        self.request = request
        folder = run_folder(config)
        self.folder = folder
        self.window = config.window_schedule()
        self.learning_rate = config.learning_rate_schedule()
        self.context = parallel.context_group(config.parallel, ranks, built.platform)
        self.model = wrap(built.chunks, config)
        self.optimizer = build_optimizer(self.model, config)
        self.stepper = Stepper(self.model, self.optimizer, built.platform, ranks, config, self.context)
        self.batches = BatchMaker(
            config=config,
            ranks=ranks,
            context=cp_options(config, self.context),
            short_losses=None if inputs.scores is None else inputs.scores.read,
            bos_id=inputs.bos_id,
            outline_at=inputs.train.outline,
        )
        # read now, because the files may have changed or be gone when the first checkpoint is written
        data = agreement.run_on_rank0(lambda: data_fingerprints(config), Path())
        self.checkpointer = Checkpointer(self.model, self.optimizer, config, ranks, data)
        self.start = self._restore()
        self.step = self.start.step
        # the folder, if the run resumes from a checkpoint inside it
        self.continued: Path | None = None
        if inputs.checkpoint and folder and inputs.checkpoint.run.resolve() == folder.resolve():
            self.continued = folder
        self.records = RunRecords(config, info, self.step, first=ranks.world == 0)
        if folder is not None:
            is_continued = self.continued is not None
            agreement.run_on_rank0(lambda: self.records.open(folder, is_continued=is_continued), folder)
        self.incidents = Incidents(config, self.records, self.start.trainer_state)
        self.validation = self._open_validation()
        self.trajectory: Trajectory | None = None
        if config.checkpoint.dump_trajectory:
            self.trajectory = Trajectory(config, built.chunks, ranks, inputs, self.stepper.weigher, self.step)
        self.in_flight: deque[InFlight] = deque()  # the oldest first
        self._collected = 0.0  # when the results of the last step arrived
        # the same on all ranks, as of the steps that `collect_results` has just collected:
        self.stopped_by = 0  # a signal that any rank has received
        self.writing = True  # any rank is still writing or publishing a checkpoint, or this is not known yet
        self.save_by_clock = False  # a checkpoint is due by the clock of any rank

    def _restore(self) -> Position:
        """Load the checkpoint, or the optimizer's state that a new run starts with."""
        heartbeat.beat("loading")
        if self.folder is not None:
            self.checkpointer.prepare(self.folder)
        if self.inputs.checkpoint is not None:
            return self.checkpointer.load(self.inputs.checkpoint)
        if self.inputs.pretrained is not None and self.config.checkpoint.init_optimizer:
            self.checkpointer.load_optimizer(self.inputs.pretrained)
            if self.ranks.world == 0:
                logger.info("optimizer state from %s", self.inputs.pretrained.folder)
        return Position(step=0, consumed_samples=0)

    def _open_validation(self) -> Validation:
        """Prepare validation and lm-eval, and read what a resumed run has evaluated before."""
        config = self.config
        vocab_size = self.inputs.vocab_size
        setting = ""
        if config.training.eval_interval:
            setting = agreement.run_on_rank0(lambda: validation_setting(config, vocab_size), Path(), reads=True)
        lm_eval = None
        if config.training.lm_eval_interval:
            lm_eval = LmEval(config, self.stepper, vocab_size, self.inputs.bos_id)
        validation = Validation(
            config=config,
            stepper=self.stepper,
            batches=self.batches,
            rows=self.inputs.valid,
            records=self.records,
            lm_eval=lm_eval,
            setting=setting,
        )
        if self.continued is not None:
            validation.recall(self.continued, self.step)
        return validation

    def fit(self, run: Path | None, has_next_stage: bool) -> Ending:
        """Run all remaining steps, or until early stopping; save when requested and at the end. Args as of `train`."""
        # Libraries, model and optimizer are half a million permanent objects. Collections that skip them take
        # milliseconds, so they run often enough that the reference cycles of a checkpoint do not accumulate.
        gc.collect()
        gc.freeze()
        gc.collect()
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as prefetch:
                self._train(prefetch)
        except DivergedError as error:  # raised on all ranks; nothing is saved anymore
            self.checkpointer.finish()
            self.records.close(self.step, f"diverged: the {error.what} was {error.value}")
            newest_checkpoint = self.checkpointer.saved
            if newest_checkpoint is None and self.inputs.checkpoint is not None:
                newest_checkpoint = self.inputs.checkpoint.folder
            if newest_checkpoint is None or step_of(newest_checkpoint) != self.step:
                return Ending(0, self.step, newest_checkpoint, error)
            # it has the very weights that gave this loss
            good = next((checkpoint.folder for checkpoint in older(newest_checkpoint)), None)
            return Ending(0, self.step, good, error, spoilt=newest_checkpoint)
        finally:
            gc.unfreeze()
        return self._finish(run, has_next_stage)

    def _train(self, prefetch: ThreadPoolExecutor) -> None:
        """Train until the last step, a signal, or early stopping."""
        validation = self.validation
        if self.step == 0:  # signals are deferred: there is no checkpoint to continue from
            validation.run_if_due(0, None)
        elif self.continued is not None:  # perhaps stopped before the validation of this step
            self.stopped_by = validation.run_if_due(self.step, self.request)
        batches = self._prefetch(prefetch, self.step)
        while batches is not None and not self.stopped_by and validation.stop_reason is None:
            heartbeat.beat(f"step {self.step}")
            waiting_since = time.perf_counter()
            step_batches = batches.result()
            batches = self._prefetch(prefetch, self.step + 1)
            self.launch(step_batches, waiting_since)
            step = self.step
            # a validation, a trajectory and a decision to skip a step need the results of all steps before
            if validation.is_due(step) or self.trajectory is not None or self.incidents.may_skip:
                self.collect_results()
            else:
                self.collect_results(keep=self.platform.steps_ahead)
            due = self.checkpointer.poll(step, writing=self.writing, by_clock=self.save_by_clock)
            due = due or step == self.config.training.train_iters or validation.runs_lm_eval(step)
            if self.stopped_by or due:  # save before the validation, which may outlast the grace period of a signal
                self.collect_results()
                self._save()
            if not self.stopped_by:
                self.stopped_by = validation.run_if_due(step, self.request)
                if (self.stopped_by or validation.stop_reason is not None) and not due:
                    self._save()
        if validation.stop_reason is not None and not self.stopped_by:
            validation.run_lm_eval(self.step)

    def _prefetch(self, prefetch: ThreadPoolExecutor, step: int) -> Future[StepBatches] | None:
        """Begin to make the batches of a step in a thread; None after the last step."""
        if step < self.config.training.train_iters:
            return prefetch.submit(self.make_batches, step)
        return None

    def make_batches(self, step: int) -> StepBatches:
        """Make this rank's batches of a step; depends only on the step."""
        return self.batches.train(self.inputs.train.row, step, self._first_sample(step), self.window.window_at(step))

    def _first_sample(self, step: int) -> int:
        return self.config.data.first_sample + self.consumed_samples(step)

    def consumed_samples(self, step: int) -> int:
        """Return the number of rows before a step; a resumed run continues the count, even with another batch size."""
        return self.start.consumed_samples + (step - self.start.step) * self.config.data.global_batch_size

    def launch(self, batches: StepBatches, waiting_since: float) -> None:
        """Launch the next step on the device: forward, backward and update. The host does not wait."""
        data_wait_s = time.perf_counter() - waiting_since
        set_learning_rate(self.optimizer, self.learning_rate.at(self.step), self.config.optimizer.weight_decay)
        self.context.take_sent_bytes()  # exclude what validations sent
        accepts = None
        if self.incidents.may_skip:
            accepts = self.incidents.accepts
        pending = self.stepper.launch(batches, accepts)
        self.in_flight.append(
            InFlight(
                step=self.step,
                pending=pending,
                results=AsyncHostCopy({**pending.values, **self._of_all_ranks()}),
                waiting_since=waiting_since,
                data_wait_s=data_wait_s,
                save_stall_s=self.checkpointer.take_stall(),
                checkpoints_begun=self.checkpointer.begun,
            )
        )
        self.step += 1

    def _collect(self, launched: InFlight) -> StepRecord:
        """Wait for the results of a step; keep what all ranks reported about signals and checkpoints."""
        values = launched.results.values()
        step = launched.step
        stop_signal, writing, by_clock, peak_memory = values["largest"]
        self.stopped_by = self.stopped_by or signal_of(int(stop_signal))
        # the status is outdated if the step was launched before the last result began to be published
        self.writing = bool(writing) or launched.checkpoints_begun != self.checkpointer.begun
        self.save_by_clock = bool(by_clock)
        began = max(launched.waiting_since, self._collected)
        self._collected = time.perf_counter()
        samples = range(self._first_sample(step), self._first_sample(step + 1))
        source_rows = None
        if isinstance(self.inputs.train, BlendedRows) and self.ranks.world == 0:
            source_rows = self.inputs.train.rows_of(samples)
        return StepRecord(
            step=step,
            samples=samples,
            source_rows=source_rows,
            consumed_samples=self.consumed_samples(step + 1),
            window=self.window.window_at(step),
            learning_rate=self.learning_rate.at(step),
            result=launched.pending.result(values),
            cp_bytes=int(values["cp_bytes"][0]),
            peak_memory_bytes=int(peak_memory),
            step_time_s=self._collected - began,
            data_wait_s=launched.data_wait_s,
            save_stall_s=launched.save_stall_s,
        )

    def collect_results(self, keep: int = 0) -> None:
        """Wait for the results of all steps in flight except the last `keep`; check and record them.

        Raises:
            DivergedError: the run cannot continue after a step; `self.step` is then this one.
        """
        self.writing = True
        self.save_by_clock = False
        while len(self.in_flight) > keep:
            record = self._collect(self.in_flight.popleft())
            try:
                self.incidents.after_step(record)
                self.records.after_step(record)
                if self.trajectory is not None:
                    self.trajectory.after_step(record)
            except DivergedError:
                self.step = record.step
                raise

    def _of_all_ranks(self) -> dict[str, Tensor]:
        """Reduce the signal, the saving status, the peak memory (maximum) and the sent bytes (sum)."""
        device = self.platform.device
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        sent_bytes = to_device([self.context.take_sent_bytes()], device)
        largest = to_device([self.request.priority, *self.checkpointer.status(), peak], device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(sent_bytes)
        return {"largest": largest, "cp_bytes": sent_bytes}

    def _save(self) -> None:
        """Start saving a checkpoint of the current position; one rank writes passage.json. Nothing without --save."""
        if self.folder is None:
            return
        heartbeat.beat(f"saving after {self.step} steps")
        ranks = self.ranks
        consumed_samples = self.consumed_samples(self.step)
        self.records.sync()
        self.checkpointer.save(self.folder, Position(self.step, consumed_samples, self.incidents.state_dict()))
        if ranks.reports_loss and ranks.context == 0 and ranks.data == 0:
            tokenizer = None
            try:
                if self.config.data.tokenizer_model:
                    tokenizer = Tokenizer(self.config.data.tokenizer_model)
                passage = self.stepper.weigher.passage(self.step - 1, tokenizer)
                if passage is not None:
                    passage.write(self.folder)
            except (UserError, OSError) as error:  # only the report shows it
                logger.warning("warning: no passage is written (%s); training goes on without it", first_line(error))

    def _finish(self, run: Path | None, has_next_stage: bool) -> Ending:
        """Publish the last checkpoint, report how the run ended, and close its files."""
        heartbeat.beat(f"the end after {self.step} steps")
        self.checkpointer.finish()
        step = self.step
        last_step = self.config.training.train_iters
        saved = self.checkpointer.saved
        stopped_early = None
        if step < last_step:
            stopped_early = self.validation.stop_reason
        stopped_by = 0
        if has_next_stage or step < last_step or self.validation.is_due(step):
            stopped_by = self.stopped_by
        note = self.records.note
        if stopped_by:
            how = f"stopped by {signal.Signals(stopped_by).name}"
            if saved is None:
                note("stopped by a signal; nothing saved: no --save folder")
            else:
                resume = as_flag("load", run)
                note(f"stopped by a signal; saved after {step} steps in {saved}; {resume} continues from there")
        else:
            how = stopped_early or "done"
            if not has_next_stage:
                self._note_end(stopped_early)
            if stopped_early is not None:
                note(f"{stopped_early}; {step} of {last_step} steps done")
        if self.trajectory is not None:
            sync_params(self.model)
            self.trajectory.weights("final")
        self.records.close(step, how)
        return Ending(stopped_by, step, saved)

    def _note_end(self, stopped_early: str | None) -> None:
        """Say where the model of a completed run is, or that no step was left to do."""
        step = self.step
        saved = self.checkpointer.saved
        if self.start.step == step:
            done = f"all {step:,} steps were done before; raise --train-iters"
            if stopped_early is not None:
                done = "the run stopped early before; raise --early-stopping-patience"
            self.records.note(f"nothing is left to do: {done} for more")
        elif saved is not None:
            folder = shlex.quote(str(self.folder))
            self.records.note(
                f"done: the model after {step:,} steps is in {saved}; {program('report')} {folder} shows how it went, "
                f"{program('convert')} megatron-to-hf --input {folder} --output MODEL exports it"
            )
