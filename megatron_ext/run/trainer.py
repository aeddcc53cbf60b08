"""Run the training loop.

build: open the inputs -> join the processes -> build the model
Trainer: restore -> for each step: take_batches -> launch -> collect_results -> callbacks; save and validate when due
"""

from __future__ import annotations

import gc
import logging
import resource
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import heartbeat, rope
from megatron_ext.batch import StepBatches
from megatron_ext.checkpoint.damage import agree
from megatron_ext.checkpoint.hf.names import count_active_parameters, count_parameters
from megatron_ext.cli import program
from megatron_ext.config import Config
from megatron_ext.config.arguments import as_flag
from megatron_ext.config.warnings import keeps_weights, warnings_of
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine import compat, environment, parallel, te_options
from megatron_ext.engine.fusions import fusions_here
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import build_optimizer, gradient_sharing, set_learning_rate, sync_params, wrap
from megatron_ext.engine.platform import Platform
from megatron_ext.engine.platform import choose as choose_platform
from megatron_ext.engine.state import Checkpointer, Position, load_weights
from megatron_ext.engine.step import DivergedError, PendingStep, Stepper
from megatron_ext.engine.transfer import AsyncHostCopy, to_device
from megatron_ext.engine.weights import blank, initialise
from megatron_ext.monitoring.early_stopping import early_stopping
from megatron_ext.planning.step_time import read_speeds
from megatron_ext.run.batches import BatchMaker, context_options
from megatron_ext.run.evaluation import Validation
from megatron_ext.run.incidents import Incidents
from megatron_ext.run.inputs import Inputs, open_inputs
from megatron_ext.run.records import RunInfo, RunRecords, StepRecord
from megatron_ext.run.signals import Divergence, Ending, StopRequest
from megatron_ext.run.trajectory import Trajectory
from megatron_ext.run.watchdog import Watchdog

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


def train(config: Config, request: StopRequest, *, run: Path | None, has_next_stage: bool = False) -> Ending:
    """Run the configuration from its start, or from a checkpoint, to its last step or a signal.

    The process groups stay initialized.

    Args:
        config: of the run, or of one stage.
        request: records signals from here on, also for the following stages.
        run: the folder to pass to --load to continue; a stage's own folder is inside it.
        has_next_stage: another stage follows, which a signal during the last step must stop.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
    """
    built = build(config)
    announce(config, built)
    request.listen()
    ranks, save = built.ranks, config.checkpoint.save
    timeout_s = config.parallel.watchdog_seconds(ranks.world_size)
    with Watchdog(ranks.world, Path(save) if save else None, timeout_s):
        ending = Trainer(config, built).fit(request, run=run, has_next_stage=has_next_stage)
        parallel.finish_stage()
    return ending


@dataclass(frozen=True, eq=False)
class Built:
    """The components of one process's part of a run.

    Attributes:
        platform, ranks: the device of this process and its ranks in the process groups.
        inputs: the inputs of the run.
        chunks: the model of this pipeline stage, with its initial weights, or uninitialized if a checkpoint has them.
        info: description for the run's history.
    """

    platform: Platform
    ranks: parallel.Ranks
    inputs: Inputs
    chunks: Sequence[PackedGPT]
    info: RunInfo


def build(config: Config) -> Built:
    """Open the inputs of a run, join the processes and build the model.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
        RuntimeError: the processes have found different checkpoints.
    """
    compat.check_version()
    platform = choose_platform(config.parallel.device)
    compat.install_optimizer()
    inputs = open_inputs(config)
    ranks = parallel.start(config.parallel, config.model.num_layers, platform, config.training.seed)
    agree(inputs.checkpoint)
    te_options.start_tensor_overlap(config, ranks.tensor_size)
    chunks = build_chunks(config, inputs.vocab_size, platform)
    if inputs.pretrained is None and inputs.checkpoint is None:
        initialise(chunks, config.model, inputs.vocab_size, config.training.seed, ranks)
    else:
        blank(chunks)
    if inputs.pretrained is not None:
        load_weights(chunks, inputs.pretrained, ranks)
    return Built(platform, ranks, inputs, chunks, run_info(config, platform, ranks, inputs))


def announce(config: Config, built: Built) -> None:
    """Log the run's plan and warnings on rank 0; all ranks call this because it compares their environments."""
    platform, ranks, inputs = built.platform, built.ranks, built.inputs
    surroundings = environment.report(config, platform, ranks.world_size)
    if ranks.world != 0:
        return
    data, schedule, pretrained = config.data, config.window_schedule(), inputs.pretrained
    if pretrained is not None:
        logger.info("weights from %s", pretrained.folder)
        for line in rope.advice(config.model, data.seq_length, pretrained.model, pretrained.length):
            logger.info("%s", line)
    for line in surroundings:
        logger.info("%s", line)
    logger.info("device %s, %s; %s", platform.device.type, platform.communication, fusions_here(platform, config))
    logger.info(
        f"{count_parameters(config.model, inputs.vocab_size):,} parameters on {ranks.world_size} processes: "
        f"{ranks.layout}, {gradient_sharing(config)}"
    )
    logger.info(
        f"{data.global_batch_size * data.seq_length:,} tokens per step: {data.global_batch_size} rows of "
        f"{data.seq_length:,}, {config.microbatches(ranks.world_size)} micro-batches per rank"
    )
    logger.info(
        f"window: {schedule.kind.value}, {schedule.window_at(0):,} at step 0, {schedule.end:,} from step "
        f"{schedule.expansion_steps:,} of {config.training.train_iters:,} on"
    )
    for line in warnings_of(config):
        logger.warning("warning: %s", line)
    source, options = inputs.checkpoint, config.checkpoint
    if source is not None and options.init_from and source.run.resolve() != Path(options.save or "").resolve():
        logger.warning(
            "warning: init_from: got %s, but the run continues from %s, as load says; add --load none to begin with "
            "the former",
            options.init_from,
            source.folder,
        )


def run_info(config: Config, platform: Platform, ranks: parallel.Ranks, inputs: Inputs) -> RunInfo:
    """Describe the model, the machine and the data for the run's history."""
    here = environment.look(config, platform)
    peak_flops = None
    if platform.device.type == "cuda" and config.training.bf16:
        gpu = read_speeds().of_device(torch.cuda.get_device_name())
        teraflops = None if gpu is None else gpu.fp8 if config.training.fp8_format is not None else gpu.bf16
        peak_flops = None if teraflops is None else teraflops * 1e12 * ranks.world_size
    vocab_size, mixed = inputs.vocab_size, inputs.rows.mixed
    active = count_active_parameters(config.model, vocab_size)
    facts: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "host": here.host,
        "devices": here.devices,
        "processes": ranks.world_size,
        "layout": ranks.layout,
        "parameters": count_parameters(config.model, vocab_size),
        "vocab_size": vocab_size,
        "versions": {"python": here.python, "torch": here.torch, "megatron-core": here.megatron_core}
        | {name: version for name, version in here.packages if version is not None},
        "data": [{"name": part.label, "prefix": part.prefix, "packing": part.packing} for part in config.data.parts],
    }
    if mixed is not None:
        facts["sources"] = {
            source.label: {"share": source.share, "row_tokens": source.row_tokens} for source in mixed.sources
        }
    return RunInfo(active, peak_flops, facts)


@dataclass(frozen=True)
class LaunchedStep:
    """A step in flight: launched, its results not yet read.

    Attributes:
        before: the position before this step.
        learning_rate: of this step.
        result: the step's result on the device.
        values: the step's values and those of `Trainer._of_all_ranks`, in an asynchronous copy to the host.
        began: when the host started it, by `time.perf_counter`.
        waited_seconds, save_stall_seconds: as in `StepRecord`.
        threads: the checkpointer's count when the ranks exchanged its status.
    """

    before: Position
    learning_rate: float
    result: PendingStep
    values: AsyncHostCopy
    began: float
    waited_seconds: float
    save_stall_seconds: float
    threads: int


@dataclass(frozen=True)
class RankConsensus:
    """State of all ranks after a step.

    Attributes:
        signal: received by any rank; 0 for none.
        writing: any rank is still writing or publishing a checkpoint, or this is not known yet.
        by_clock: a checkpoint is due by the clock of any rank.
    """

    signal: int = 0
    writing: bool = True
    by_clock: bool = False


class Callback(Protocol):
    """Called after every step, in order, once its results are known."""

    def after_step(self, record: StepRecord) -> None:
        """Process a step; raise DivergedError if the run cannot continue after it."""


class Trainer:
    """Trains one rank's part of a model; after construction the model is at the run's start or resumed position.

    On CUDA, a step's results are copied to the host while the next step runs; the callbacks are called after the copy.

    Args:
        config: the run's, or a stage's.
        built: of this configuration.
    """

    def __init__(self, config: Config, built: Built) -> None:
        platform, ranks, inputs, chunks = built.platform, built.ranks, built.inputs, built.chunks
        self.config, self.platform, self.ranks, self.inputs = config, platform, ranks, inputs
        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        self.window = config.window_schedule()
        self.learning_rate = config.learning_rate_schedule()
        context = parallel.context_group(config.parallel, ranks, platform)
        self.traffic = context.traffic
        self.model = wrap(chunks, config)
        self.optimizer = build_optimizer(self.model, config)
        self.stepper = Stepper(
            model=self.model, optimizer=self.optimizer, platform=platform, ranks=ranks, config=config, context=context
        )
        short_losses = inputs.scores.read if inputs.scores is not None else None
        self.batches = BatchMaker(config, ranks, context_options(config, ranks, context), short_losses, inputs.bos_id)
        self.checkpointer = Checkpointer(self.model, self.optimizer, config, ranks)
        self.began = self.position = self._restore()
        first_step = self.began.step
        self.records = RunRecords(config, built.info, first_step, first=ranks.world == 0)
        self._on_rank0(self.records.open, self.folder)
        self.incidents = Incidents(config, self.records)
        self.incidents.load_state_dict(self.began.trainer_state)
        counted = self._on_rank0(lambda own: early_stopping(config, own, first_step), self._own_folder(), reads=True)
        self.early = counted or early_stopping(config, None, first_step)
        self.validation = Validation(config, self.stepper, self.batches, inputs.rows.valid, self.records, self.early)
        self.trajectory: Trajectory | None = None
        if config.checkpoint.dump_trajectory:
            self.trajectory = Trajectory(config, chunks, ranks, inputs, self.stepper.weigher)
        callbacks: list[Callback | None] = [self.incidents, self.records, self.trajectory]
        self.callbacks = [callback for callback in callbacks if callback is not None]
        self.pending: deque[LaunchedStep] = deque()  # the oldest first
        self._collected = 0.0  # when the results of the last step arrived
        self._next: Future[StepBatches] | None = None  # batches of the next step
        self._waited = 0.0

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

    def _on_rank0(self, action: Callable[[Path], Answer], folder: Path | None, *, reads: bool = False) -> Answer | None:
        """Run `action` with a folder on rank 0 and return its result on all ranks; None without a folder."""
        if folder is None:
            return None
        return parallel.run_on_rank0(self.ranks, lambda: action(folder), folder, reads=reads)

    def _own_folder(self) -> Path | None:
        """Return the run's folder if the run resumes from a checkpoint inside it."""
        source = self.inputs.checkpoint
        if source is None or self.folder is None or source.run.resolve() != self.folder.resolve():
            return None
        return self.folder

    def fit(self, request: StopRequest, *, run: Path | None, has_next_stage: bool) -> Ending:
        """Run all remaining steps, or until early stopping; save when requested and at the end."""
        gc.collect()
        gc.freeze()  # libraries, model and optimizer: half a million permanent objects. Collections then take
        gc.collect()  # milliseconds, and the reference cycles of a checkpoint do not accumulate
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as self._prefetch:
                stopping = self._train(request)
        except DivergedError as error:  # raised on all ranks; nothing is saved anymore
            return self._diverged(error)
        finally:
            gc.unfreeze()
        return self._finish(stopping, run, has_next_stage)

    def _train(self, request: StopRequest) -> int:
        """Train; return the signal that stopped the run before its last step, or 0."""
        last = self.config.training.train_iters
        if self.trajectory is not None:
            self.trajectory.begin(self.position.step)
        stopping = self.validation.before_training(self.position.step, request, continued=self._own_folder())
        while self.position.step < last and not stopping and self.early.reason is None:
            self.launch(self._take_batches(), request)
            step = self.position.step
            consensus = self.collect_results(keep=0 if self._needs_results(step) else self.platform.steps_ahead)
            due = self.checkpointer.poll(step, writing=consensus.writing, by_clock=consensus.by_clock)
            due, stopping = due or step == last, consensus.signal
            if stopping or due:  # save before the validation, which may outlast the grace period of a signal
                stopping = self.collect_results().signal or stopping
                self._save()
            if not stopping:
                stopping = self.validation.after_step(step, request)
                if (stopping or self.early.reason is not None) and not due:
                    self._save()
        return stopping

    def _needs_results(self, step: int) -> bool:
        """Return whether the results of all steps must be known before anything else happens after `step` steps."""
        return self.validation.is_due(step) or self.trajectory is not None or self.incidents.may_skip

    def make_batches(self, step: int) -> StepBatches:
        """Make this rank's batches of a step; depends only on the step."""
        return self.batches.train(self.inputs.rows.train, step, self.first_sample(step), self.window.window_at(step))

    def _take_batches(self) -> StepBatches:
        """Return the batches of the next step, and start preparing those of the following one in another thread."""
        step = self.position.step
        heartbeat.beat(f"step {step}")
        if self._next is None:
            self._next = self._prefetch.submit(self.make_batches, step)
        began = time.perf_counter()
        batches = self._next.result()
        self._waited = time.perf_counter() - began
        self._next = None
        if step + 1 < self.config.training.train_iters:
            self._next = self._prefetch.submit(self.make_batches, step + 1)
        return batches

    def first_sample(self, step: int) -> int:
        """Return the first row of a step: rows are consecutive, also if a resumed run has a larger batch size."""
        data = self.config.data
        consumed = self.began.consumed_samples + (step - self.began.step) * data.global_batch_size
        return data.first_sample + consumed

    def launch(self, batches: StepBatches, request: StopRequest) -> None:
        """Launch the next step on the device: forward, backward and update. The host does not wait."""
        began, before = time.perf_counter() - self._waited, self.position
        learning_rate = self.learning_rate.at(before.step)
        set_learning_rate(self.optimizer, learning_rate, self.config.optimizer.weight_decay)
        self.traffic.take()  # exclude the traffic of validations
        result = self.stepper.launch(batches, self.incidents.accepts if self.incidents.may_skip else None)
        self.pending.append(
            LaunchedStep(
                before=before,
                learning_rate=learning_rate,
                result=result,
                values=AsyncHostCopy(torch.cat([result.values, self._of_all_ranks(request.asked)])),
                began=began,
                waited_seconds=self._waited,
                save_stall_seconds=self.checkpointer.take_stall(),
                threads=self.checkpointer.threads,
            )
        )
        self.position = Position(before.step + 1, before.consumed_samples + self.config.data.global_batch_size)

    def collect_results(self, keep: int = 0) -> RankConsensus:
        """Wait for the results of all pending steps except the last `keep`, and call the callbacks.

        Raises:
            DivergedError: the run cannot continue after a step; `position` is then the one before it.
        """
        consensus, data, mixed = RankConsensus(), self.config.data, self.inputs.rows.mixed
        while len(self.pending) > keep:
            step = self.pending.popleft()
            *values, asked, writing, by_clock, peak_memory, cp_bytes = step.values.values()
            now = time.perf_counter()
            first_sample = self.first_sample(step.before.step)
            samples = range(first_sample, first_sample + data.global_batch_size)
            record = StepRecord(
                step=step.before.step,
                samples=samples,
                source_rows=mixed.rows_of(samples) if mixed is not None and self.ranks.world == 0 else None,
                consumed_samples=step.before.consumed_samples + data.global_batch_size,
                window=self.window.window_at(step.before.step),
                learning_rate=step.learning_rate,
                result=step.result.result(values),
                cp_bytes=int(cp_bytes),
                peak_memory_bytes=int(peak_memory),
                seconds=now - max(step.began, self._collected),
                waited_seconds=step.waited_seconds,
                save_stall_seconds=step.save_stall_seconds,
            )
            self._collected = now
            try:
                for callback in self.callbacks:
                    callback.after_step(record)
            except DivergedError:
                self.position = step.before
                raise
            # the status is outdated if the step was launched before the last result began to be published
            outdated = step.threads != self.checkpointer.threads
            consensus = RankConsensus(consensus.signal or int(asked), bool(writing) or outdated, bool(by_clock))
        return consensus

    def _of_all_ranks(self, stop_asked: int) -> Tensor:
        """Reduce the `RankConsensus`, the peak memory (maximum) and the context-parallel bytes (sum); float64 [5]."""
        on_cuda = self.platform.device.type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated() if on_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        mine = to_device([stop_asked, *self.checkpointer.status(), peak, self.traffic.take()], self.platform.device)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        dist.all_gather(everyone, mine)
        of_all = torch.stack(everyone)
        return torch.cat([of_all[:, :-1].amax(dim=0), of_all[:, -1:].sum(dim=0)])

    def _save(self) -> None:
        """Start saving a checkpoint of the current position, if the run has a folder."""
        if self.folder is not None:
            heartbeat.beat(f"saving after {self.position.step} steps")
            self._write_passage(self.folder)
            self.checkpointer.save(self.folder, replace(self.position, trainer_state=self.incidents.state_dict()))

    def _write_passage(self, folder: Path) -> None:
        """Write passage.json: some tokens of one row with their latest weights."""
        if not self.ranks.shows_passage:
            return
        model = self.config.data.tokenizer_model
        passage = self.stepper.weigher.passage(self.position.step - 1, Tokenizer(model) if model else None)
        if passage is not None:
            passage.write(folder)

    def _finish(self, stopping: int, run: Path | None, has_next_stage: bool) -> Ending:
        """Publish the last checkpoint, report how the run ended, and close its files."""
        heartbeat.beat(f"the end after {self.position.step} steps")
        self.checkpointer.finish()
        step = self.position.step
        left = has_next_stage or step < self.config.training.train_iters or self.validation.is_due(step)
        ending = Ending(stopping if left else 0, step, self.checkpointer.saved)
        early = self.early.reason if step < self.config.training.train_iters else None
        if ending.signal:
            kept = f"saved after {step} steps" if ending.checkpoint else "nothing saved: no --save folder"
            again = f" in {ending.checkpoint}; {as_flag('load', run)} goes on from there" if ending.checkpoint else ""
            self.records.note(f"stopped by a signal; {kept}{again}")
        elif not keeps_weights(self.config):
            self.records.note("warning: the weights are lost: the run had no --save folder")
        elif self.began.step == step and not has_next_stage:
            done = f"all {step:,} steps were done before; --train-iters N for more"
            if early is not None:
                patience = self.config.training.early_stopping_patience
                done = f"the run stopped early before; --early-stopping-patience N above {patience} for more"
            self.records.note(f"nothing is left to do: {done}")
        elif ending.checkpoint is not None and not has_next_stage:
            folder = shlex.quote(str(self.folder))
            self.records.note(
                f"done: the model after {step:,} steps is in {ending.checkpoint}; {program('report')} {folder} "
                f"shows how it went, {program('convert')} megatron-to-hf --input {folder} --output MODEL exports it"
            )
        if self.trajectory is not None:
            sync_params(self.model)
            self.trajectory.weights("final")
        if self.folder is not None:
            self._write_passage(self.folder)
        if early is not None and not ending.signal:
            self.records.note(f"{early}; {step} of {self.config.training.train_iters} steps done")
        how = f"stopped by {signal.Signals(ending.signal).name}" if ending.signal else early or "done"
        self.records.close(step, how)
        return ending

    def _diverged(self, error: DivergedError) -> Ending:
        """End a run whose values are not finite."""
        self.checkpointer.finish()
        self.records.close(self.position.step, f"diverged: the {error.what} was {error.value}")
        begun_from = self.inputs.checkpoint
        saved = self.checkpointer.saved or (begun_from.folder if begun_from is not None else None)
        return Ending(0, self.position.step, saved, Divergence(error.what, error.value, error.needs))
