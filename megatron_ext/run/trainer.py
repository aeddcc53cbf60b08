"""Run the training loop.

build: open the inputs -> join the processes -> build the model
Trainer: restore -> for each step: make_batches -> launch -> collect_results -> callbacks; save and validate when due
"""

import gc
import logging
import resource
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import heartbeat
from megatron_ext.batch import StepBatches
from megatron_ext.checkpoint.hf.names import count_active_parameters, count_parameters
from megatron_ext.cli import program
from megatron_ext.config import Config
from megatron_ext.config.arguments import as_flag
from megatron_ext.config.checks import WARNINGS, broken
from megatron_ext.context_parallel.choice import context_options
from megatron_ext.data.rows.blend import BlendedRows
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.text.tokenizer import Tokenizer, ids_without_rows
from megatron_ext.device import AsyncHostCopy, to_device
from megatron_ext.engine import agreement, environment, parallel
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import build_optimizer, gradient_sharing, set_learning_rate, sync_params, wrap
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.platform import choose as choose_platform
from megatron_ext.engine.state import Checkpointer, Position, agree, load_weights
from megatron_ext.engine.step import PendingStep, Stepper
from megatron_ext.engine.transformer import fusions_here
from megatron_ext.engine.weights import initialise, mark_parts
from megatron_ext.errors import DivergedError, UserError, first_line
from megatron_ext.planning.step_time import read_speeds
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.callbacks import Callback, Incidents, Losses, RunInfo, RunRecords, StepRecord
from megatron_ext.run.identity import data_fingerprints
from megatron_ext.run.inputs import Inputs, open_inputs, validation_setting
from megatron_ext.run.lm_eval import LmEval
from megatron_ext.run.signals import Ending, StopRequest
from megatron_ext.run.trajectory import Trajectory
from megatron_ext.run.validation import Validation, read_losses, read_scored, read_validated
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
    ranks, save = built.ranks, config.checkpoint.save
    timeout_s = config.parallel.watchdog_timeout
    if timeout_s is None:
        timeout_s = 0.9 * 60 * config.parallel.distributed_timeout_minutes if ranks.world_size > 1 else 1800.0
    with Watchdog(ranks.world, Path(save) if save else None, timeout_s):
        ending = Trainer(config, built, info, request).fit(run, has_next_stage)
        parallel.finish_stage()
    return ending


@dataclass(frozen=True, eq=False)
class Built:
    """One process's part of a run; the model's matrices are 0 if a checkpoint has them."""

    platform: Platform
    ranks: parallel.Ranks
    inputs: Inputs
    chunks: Sequence[PackedGPT]


def build(config: Config) -> Built:
    """Open the inputs of a run, join the processes and build the model.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
        RuntimeError: the processes have found different checkpoints.
    """
    platform = choose_platform(config.parallel.device)
    inputs = open_inputs(config)
    ranks = parallel.start(config.parallel, config.model.num_layers, platform, config.training.seed)
    agree(inputs.checkpoint)
    parallel.start_tensor_overlap(config, ranks)
    chunks = build_chunks(config, inputs.vocab_size, platform)
    mark_parts(chunks, config.model, ranks)
    if inputs.pretrained is None and inputs.checkpoint is None:
        initialise(chunks, config.model, inputs.vocab_size, config.training.seed, ranks)
    if inputs.pretrained is not None:
        load_weights(chunks, inputs.pretrained, ranks)
    return Built(platform, ranks, inputs, chunks)


def describe_run(config: Config, built: Built) -> RunInfo:
    """Describe the run for its history, and log its setup and warnings on rank 0. Collective."""
    platform, ranks, inputs, data = built.platform, built.ranks, built.inputs, config.data
    here = environment.look(config, platform)
    parameters, schedule = count_parameters(config.model, inputs.vocab_size), config.window_schedule()
    fused = [name for name, is_fused in fusions_here(platform, config).items() if is_fused]
    lines = [
        *([f"weights from {inputs.pretrained.folder}"] if inputs.pretrained is not None else []),
        *(ids_without_rows(Tokenizer(data.tokenizer_model), inputs.vocab_size) if data.tokenizer_model else []),
        *here.summary(),
        *environment.differences(here),
        f"device {platform.device.type}, {platform.communication}; fused: {', '.join(fused) or 'nothing'}",
        f"{parameters:,} parameters on {ranks.world_size} processes: {ranks.layout}, {gradient_sharing(config)}",
        f"{data.global_batch_size * data.seq_length:,} tokens per step: {data.global_batch_size} rows of "
        f"{data.seq_length:,}, {config.microbatches(ranks.world_size)} micro-batches per rank",
        f"window: {schedule.kind.value}, {schedule.window_at(0):,} at step 0, {schedule.end:,} from step "
        f"{schedule.expansion_steps:,} of {config.training.train_iters:,} on",
    ]
    if ranks.world == 0:
        for line in lines:
            logger.info("%s", line)
        for line in broken(WARNINGS, config):
            logger.warning("warning: %s", line)
        for part, rows in zip(data.parts, getattr(inputs.train, "datasets", (inputs.train,)), strict=True):
            source = getattr(rows, "sequences", rows)
            if isinstance(source, RowDataset) and source.tokens_per_epoch < source.row_length:
                text = f"{part.prefix} has {source.tokens_per_epoch:,} tokens, which each row of {source.row_length:,}"
                logger.warning("warning: data_path: %s repeats; give more text", text)
    peak_flops = None
    if platform.device.type == "cuda" and config.training.bf16:
        gpu = read_speeds().of_device(torch.cuda.get_device_name())
        teraflops = None if gpu is None else gpu.fp8 if config.training.fp8_format is not None else gpu.bf16
        peak_flops = None if teraflops is None else teraflops * 1e12 * ranks.world_size
    facts: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "host": here.host,
        "devices": here.devices,
        "processes": ranks.world_size,
        "layout": ranks.layout,
        "parameters": parameters,
        "versions": {name: version for name, version in here.versions.items() if version is not None},
    }
    if isinstance(mixed := inputs.train, BlendedRows):
        facts["sources"] = {
            label: {"share": share, "row_tokens": dataset.row_tokens}
            for label, share, dataset in zip(mixed.labels, mixed.shares, mixed.datasets, strict=True)
        }
    return RunInfo(count_active_parameters(config.model, inputs.vocab_size), peak_flops, facts)


@dataclass(frozen=True, eq=False)
class InFlight:
    """A step that is launched, whose results are on their way to the host."""

    step: int
    pending: PendingStep
    results: AsyncHostCopy
    learning_rate: float
    waiting_since: float  # when the host began to wait for its batches, by `time.perf_counter`
    data_wait_s: float
    save_stall_s: float
    checkpoints: int  # `Checkpointer.threads` at its launch


class Trainer:
    """Trains one rank's part of a model; after construction the model is at the run's start or resumed position.

    On CUDA, a step's results are copied to the host while the next step runs; the callbacks are called after the copy.
    """

    def __init__(self, config: Config, built: Built, info: RunInfo, request: StopRequest) -> None:
        platform, ranks, inputs, chunks = built.platform, built.ranks, built.inputs, built.chunks
        self.config, self.platform, self.ranks, self.inputs, self.request = config, platform, ranks, inputs, request
        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        self.window = config.window_schedule()
        self.learning_rate = config.learning_rate_schedule()
        self.context = context = parallel.context_group(config.parallel, ranks, platform)
        self.model = wrap(chunks, config)
        self.optimizer = build_optimizer(self.model, config)
        self.stepper = Stepper(
            model=self.model, optimizer=self.optimizer, platform=platform, ranks=ranks, config=config, context=context
        )
        short_losses = inputs.scores.read if inputs.scores is not None else None
        self.batches = BatchMaker(
            config, ranks, context_options(config, context), short_losses, inputs.bos_id, inputs.train.outline
        )
        # read now, because the files may have changed or be gone when the first checkpoint is written
        data = agreement.run_on_rank0(lambda: data_fingerprints(config), Path())
        self.checkpointer = Checkpointer(self.model, self.optimizer, config, ranks, data)
        self.start = self._restore()
        self.step, first = self.start.step, ranks.world == 0
        self.records = RunRecords(config, info, self.step, first=first)
        if (folder := self.folder) is not None:
            agreement.run_on_rank0(lambda: self.records.open(folder), folder)
        self.incidents = Incidents(config, self.records, self.start.trainer_state)
        # the folder, if the run resumes from a checkpoint inside it
        source = inputs.checkpoint
        self.continued = folder if source and folder and source.run.resolve() == folder.resolve() else None
        setting = ""
        if config.training.eval_interval:
            setting = agreement.run_on_rank0(lambda: validation_setting(config, inputs.vocab_size), Path(), reads=True)
        losses: Losses = {}
        validated: set[int] = set()
        scored: set[int] = set()
        if self.continued is not None:
            losses, validated, scored = agreement.run_on_rank0(
                lambda: (
                    read_losses(self.continued, self.step, setting),
                    read_validated(self.continued, self.step),
                    read_scored(self.continued, self.step),
                ),
                self.continued,
                reads=True,
            )
        if config.training.early_stopping_patience and len(validated) > len(losses):
            others = len(validated) - len(losses)
            self.records.note(f"early stopping counts anew: {others} earlier validations measured something else")
        lm_eval = None
        if config.training.lm_eval_interval:
            lm_eval = LmEval(config, self.stepper, inputs.vocab_size, inputs.bos_id)
        self.validation = Validation(
            config=config,
            stepper=self.stepper,
            batches=self.batches,
            rows=inputs.valid,
            records=self.records,
            lm_eval=lm_eval,
            setting=setting,
            losses=losses,
            validated=validated,
            scored=scored,
        )
        self.callbacks: list[Callback] = [self.incidents, self.records]  # in this order
        self.trajectory: Trajectory | None = None
        if config.checkpoint.dump_trajectory:
            self.trajectory = Trajectory(config, chunks, ranks, inputs, self.stepper.weigher, self.step)
            self.callbacks.append(self.trajectory)
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

    def fit(self, run: Path | None, has_next_stage: bool) -> Ending:
        """Run all remaining steps, or until early stopping; save when requested and at the end. Args as of `train`."""
        gc.collect()
        gc.freeze()  # libraries, model and optimizer: half a million permanent objects. Collections then take
        gc.collect()  # milliseconds, and the reference cycles of a checkpoint do not accumulate
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as prefetch:
                self._train(prefetch)
        except DivergedError as error:  # raised on all ranks; nothing is saved anymore
            self.checkpointer.finish()
            self.records.close(self.step, f"diverged: the {error.what} was {error.value}")
            source = self.inputs.checkpoint
            saved = self.checkpointer.saved or (source.folder if source is not None else None)
            return Ending(0, self.step, saved, error)
        finally:
            gc.unfreeze()
        return self._finish(run, has_next_stage)

    def _train(self, prefetch: ThreadPoolExecutor) -> None:
        """Train until the last step, a signal, or early stopping."""
        last, validation = self.config.training.train_iters, self.validation
        if self.step == 0:  # signals are deferred: there is no checkpoint to continue from
            validation.run_if_due(0, None)
        elif self.continued is not None:  # perhaps stopped before the validation of this step
            self.stopped_by = validation.run_if_due(self.step, self.request)
        batches = prefetch.submit(self.make_batches, self.step) if self.step < last else None
        while batches is not None and not self.stopped_by and validation.stop_reason is None:
            heartbeat.beat(f"step {self.step}")
            waiting_since = time.perf_counter()
            batch = batches.result()
            batches = prefetch.submit(self.make_batches, self.step + 1) if self.step + 1 < last else None
            self.launch(batch, waiting_since)
            step = self.step
            # a validation, a trajectory and a decision to skip a step need the results of all steps before
            waits = validation.is_due(step) or self.trajectory is not None or self.incidents.may_skip
            self.collect_results(keep=0 if waits else self.platform.steps_ahead)
            due = self.checkpointer.poll(step, writing=self.writing, by_clock=self.save_by_clock)
            due = due or step == last or validation.runs_lm_eval(step)
            if self.stopped_by or due:  # save before the validation, which may outlast the grace period of a signal
                self.collect_results()
                self._save()
            if not self.stopped_by:
                self.stopped_by = validation.run_if_due(step, self.request)
                if (self.stopped_by or validation.stop_reason is not None) and not due:
                    self._save()
        if validation.stop_reason is not None and not self.stopped_by:
            validation.run_lm_eval(self.step)

    def make_batches(self, step: int) -> StepBatches:
        """Make this rank's batches of a step; depends only on the step."""
        first_sample = self.config.data.first_sample + self.consumed_samples(step)
        return self.batches.train(self.inputs.train.row, step, first_sample, self.window.window_at(step))

    def consumed_samples(self, step: int) -> int:
        """Return the number of rows before a step: they are consecutive, also if a resumed run has a larger batch."""
        return self.start.consumed_samples + (step - self.start.step) * self.config.data.global_batch_size

    def launch(self, batches: StepBatches, waiting_since: float) -> None:
        """Launch the next step on the device: forward, backward and update. The host does not wait."""
        waited, learning_rate = time.perf_counter() - waiting_since, self.learning_rate.at(self.step)
        set_learning_rate(self.optimizer, learning_rate, self.config.optimizer.weight_decay)
        self.context.take_sent_bytes()  # exclude those of validations
        pending = self.stepper.launch(batches, self.incidents.accepts if self.incidents.may_skip else None)
        self.in_flight.append(
            InFlight(
                step=self.step,
                pending=pending,
                results=AsyncHostCopy({**pending.values, **self._of_all_ranks()}),
                learning_rate=learning_rate,
                waiting_since=waiting_since,
                data_wait_s=waited,
                save_stall_s=self.checkpointer.take_stall(),
                checkpoints=self.checkpointer.threads,
            )
        )
        self.step += 1

    def _collect(self, launched: InFlight) -> StepRecord:
        """Wait for the results of a step; note what its ranks said about signals and checkpoints."""
        values, step = launched.results.values(), launched.step
        stop_signal, writing, by_clock, peak_memory = values["largest"]
        self.stopped_by = self.stopped_by or int(stop_signal)
        # the status is outdated if the step was launched before the last result began to be published
        self.writing = bool(writing) or launched.checkpoints != self.checkpointer.threads
        self.save_by_clock = bool(by_clock)
        since, self._collected = max(launched.waiting_since, self._collected), time.perf_counter()
        rows, consumed = self.inputs.train, self.consumed_samples(step + 1)
        first_sample = self.config.data.first_sample
        samples = range(first_sample + self.consumed_samples(step), first_sample + consumed)
        return StepRecord(
            step=step,
            samples=samples,
            source_rows=rows.rows_of(samples) if isinstance(rows, BlendedRows) and self.ranks.world == 0 else None,
            consumed_samples=consumed,
            window=self.window.window_at(step),
            learning_rate=launched.learning_rate,
            result=launched.pending.result(values),
            cp_bytes=int(values["cp_bytes"][0]),
            peak_memory_bytes=int(peak_memory),
            step_time_s=self._collected - since,
            data_wait_s=launched.data_wait_s,
            save_stall_s=launched.save_stall_s,
        )

    def collect_results(self, keep: int = 0) -> None:
        """Wait for the results of all steps in flight except the last `keep`, and call the callbacks.

        Raises:
            DivergedError: the run cannot continue after a step; `self.step` is then this one.
        """
        self.writing, self.save_by_clock = True, False
        while len(self.in_flight) > keep:
            record = self._collect(self.in_flight.popleft())
            try:
                for callback in self.callbacks:
                    callback.after_step(record)
            except DivergedError:
                self.step = record.step
                raise

    def _of_all_ranks(self) -> dict[str, Tensor]:
        """Reduce the signal, the saving status, the peak memory (maximum) and the sent bytes (sum)."""
        on_cuda = self.platform.device.type == "cuda"
        host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_allocated() if on_cuda else host_peak
        sent = self.context.take_sent_bytes()
        largest = to_device([self.request.signal, *self.checkpointer.status(), peak], self.platform.device)
        sent_bytes = to_device([sent], self.platform.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(sent_bytes)
        return {"largest": largest, "cp_bytes": sent_bytes[0]}

    def _save(self) -> None:
        """Start saving a checkpoint of the current position and, of one rank, passage.json; if the run has a folder."""
        if self.folder is None:
            return
        heartbeat.beat(f"saving after {self.step} steps")
        ranks, consumed = self.ranks, self.consumed_samples(self.step)
        self.checkpointer.save(self.folder, Position(self.step, consumed, self.incidents.state_dict()))
        if ranks.reports_loss and ranks.context == 0 and ranks.data == 0:
            model = self.config.data.tokenizer_model
            try:
                passage = self.stepper.weigher.passage(self.step - 1, Tokenizer(model) if model else None)
                if passage is not None:
                    passage.write(self.folder)
            except (UserError, OSError) as error:  # only the report shows it
                logger.warning("warning: no passage is written (%s); training goes on without it", first_line(error))

    def _finish(self, run: Path | None, has_next_stage: bool) -> Ending:
        """Publish the last checkpoint, report how the run ended, and close its files."""
        heartbeat.beat(f"the end after {self.step} steps")
        self.checkpointer.finish()
        step, training, saved = self.step, self.config.training, self.checkpointer.saved
        early = self.validation.stop_reason if step < training.train_iters else None
        left = has_next_stage or step < training.train_iters or self.validation.is_due(step)
        ending = Ending(self.stopped_by if left else 0, step, saved)
        note = self.records.note
        if ending.signal and saved is None:
            note("stopped by a signal; nothing saved: no --save folder")
        elif ending.signal:
            resume = as_flag("load", run)
            note(f"stopped by a signal; saved after {step} steps in {saved}; {resume} continues from there")
        elif self.start.step == step and not has_next_stage:
            done, option = f"all {step:,} steps were done", "train-iters"
            if early is not None:
                done, option = "the run stopped early", "early-stopping-patience"
            note(f"nothing is left to do: {done} before; raise --{option} for more")
        elif saved is not None and not has_next_stage:
            folder = shlex.quote(str(self.folder))
            note(
                f"done: the model after {step:,} steps is in {saved}; {program('report')} {folder} shows how it went, "
                f"{program('convert')} megatron-to-hf --input {folder} --output MODEL exports it"
            )
        if early is not None and not ending.signal:
            note(f"{early}; {step} of {training.train_iters} steps done")
        if self.trajectory is not None:
            sync_params(self.model)
            self.trajectory.weights("final")
        how = f"stopped by {signal.Signals(ending.signal).name}" if ending.signal else early or "done"
        self.records.close(step, how)
        return ending
