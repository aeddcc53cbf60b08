"""The training run: `train` opens and builds everything, `Trainer.fit` is the loop.

open what is read -> join the processes -> build the model -> Trainer: restore -> fit: step, record, save, validate
"""

from __future__ import annotations

import logging
import resource
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from megatron_ext.engine import compat, environment, parallel, platform, te_options
from megatron_ext.engine.fusions import fusions_here
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import build_optimizer, gradient_sharing, set_learning_rate, settle_parameters, wrap
from megatron_ext.engine.state import Checkpointer, Position, load_weights
from megatron_ext.engine.step import DivergedError, LaunchedStep, Stepper
from megatron_ext.engine.transfer import Reading, to_device
from megatron_ext.engine.weights import blank, initialise
from megatron_ext.monitoring.early_stopping import EarlyStopping, early_stopping
from megatron_ext.planning.step_time import read_speeds
from megatron_ext.run.batches import BatchMaker, context_options
from megatron_ext.run.evaluation import Validation
from megatron_ext.run.garbage import only_new_garbage
from megatron_ext.run.incidents import Incidents, Past, past
from megatron_ext.run.inputs import Inputs, open_inputs
from megatron_ext.run.prefetch import Prefetch
from megatron_ext.run.records import FinishedStep, Machine, RunRecords
from megatron_ext.run.signals import Divergence, Ending, StopRequest
from megatron_ext.run.trajectory import Trajectory
from megatron_ext.run.watchdog import Watchdog

logger = logging.getLogger(__name__)


def train(config: Config, request: StopRequest, *, run: Path | None, goes_on: bool = False) -> Ending:
    """Run the configuration from its start, or from a checkpoint, to its last step or a signal.

    The processes stay joined.

    Args:
        config: of the run, or of one stage.
        request: notes signals from here on, for the stages after this one too.
        run: the folder that --load names to go on: a stage's own lies inside it.
        goes_on: another stage follows, which a signal during the last step must stop.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
    """
    built = build(config)
    announce(config, built.where, built.ranks, built.inputs)
    request.listen()
    ranks, save = built.ranks, config.checkpoint.save
    timeout_s = config.parallel.watchdog_seconds(ranks.world_size)
    with Watchdog(ranks.world, Path(save) if save else None, timeout_s):
        ending = Trainer(config, built).fit(request, run=run, goes_on=goes_on)
        parallel.finish_stage()
    return ending


@dataclass(frozen=True, eq=False)
class Built:
    """Holds what one process's part of a run is made of.

    Attributes:
        where, ranks: where this process computes and stands.
        inputs: what the run reads.
        chunks: the model of this pipeline stage, with its first weights, or blank where a checkpoint has them.
        machine: what the records say of it.
    """

    where: platform.Platform
    ranks: parallel.Ranks
    inputs: Inputs
    chunks: Sequence[PackedGPT]
    machine: Machine


def build(config: Config) -> Built:
    """Open what a run reads, join the processes and build the model.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
        RuntimeError: the processes have found different checkpoints.
    """
    compat.check_version()
    where = platform.choose(config.parallel.device)
    compat.install_optimizer()
    inputs = open_inputs(config)
    ranks = parallel.start(config.parallel, config.model.num_layers, where, config.training.seed)
    agree(inputs.checkpoint)
    te_options.start_tensor_overlap(config, ranks.tensor_size)
    chunks = build_chunks(config, inputs.vocab_size, where)
    if inputs.pretrained is None and inputs.checkpoint is None:
        initialise(chunks, config.model, inputs.vocab_size, config.training.seed, ranks)
    else:
        blank(chunks)
    if inputs.pretrained is not None:
        load_weights(chunks, inputs.pretrained, ranks)
    return Built(where, ranks, inputs, chunks, machine_of(config, where, ranks, inputs))


def announce(config: Config, where: platform.Platform, ranks: parallel.Ranks, inputs: Inputs) -> None:
    """Log what is about to run, and every doubt about it, on process 0; all call this, as it compares them."""
    surroundings = environment.report(config, where, ranks.world_size)
    if ranks.world != 0:
        return
    data, schedule, pretrained = config.data, config.window_schedule(), inputs.pretrained
    if pretrained is not None:
        logger.info("weights from %s", pretrained.folder)
        for line in rope.advice(config.model, data.seq_length, pretrained.model, pretrained.length):
            logger.info("%s", line)
    for line in surroundings:
        logger.info("%s", line)
    logger.info("device %s, %s; %s", where.device.type, where.communication, fusions_here(where, config))
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


def machine_of(config: Config, where: platform.Platform, ranks: parallel.Ranks, inputs: Inputs) -> Machine:
    """Say what the run computes, on what, and of which data."""
    here = environment.look(config, where)
    peak_flops = None
    if where.device.type == "cuda" and config.training.bf16:
        card = read_speeds().of_device(torch.cuda.get_device_name())
        teraflops = None if card is None else card.fp8 if config.training.fp8_format is not None else card.bf16
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
    return Machine(active, peak_flops, facts)


@dataclass(frozen=True)
class UnderWay:
    """Is a step that the device has been given and the run has not recorded.

    Attributes:
        before, after: where the run stands without and with it.
        learning_rate: of this step.
        launched: what becomes its result.
        reading: brings its values to the host, and after them those of `Trainer._of_all_processes`.
        began: when the host began with it, by `time.perf_counter`.
        waited_seconds, save_stall_seconds: as in `FinishedStep`.
        threads: the checkpointer's, when the processes said how it stands with them.
    """

    before: Position
    after: Position
    learning_rate: float
    launched: LaunchedStep
    reading: Reading
    began: float
    waited_seconds: float
    save_stall_seconds: float
    threads: int


@dataclass(frozen=True)
class Agreed:
    """Holds what all processes know of each other after a step.

    Attributes:
        signal: that any of them has got; 0 for none.
        writing: one of them still writes or publishes a checkpoint, or nothing is known of that yet.
        by_clock: by the clock of one of them, a checkpoint is due.
    """

    signal: int = 0
    writing: bool = True
    by_clock: bool = False


class Trainer:
    """Does one process's part of a run; when it is built, its model is where the run begins or continues.

    Args:
        config: the run's, or a stage's.
        built: of this configuration.
    """

    def __init__(self, config: Config, built: Built) -> None:
        where, ranks, inputs, chunks = built.where, built.ranks, built.inputs, built.chunks
        self.config, self.platform, self.ranks, self.inputs = config, where, ranks, inputs
        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        self.window = config.window_schedule()
        self.learning_rate = config.learning_rate_schedule()
        context = parallel.context_group(config.parallel, ranks, where)
        self.traffic = context.traffic
        self.model = wrap(chunks, config)
        self.optimizer = build_optimizer(self.model, config)
        self.stepper = Stepper(
            model=self.model, optimizer=self.optimizer, platform=where, ranks=ranks, config=config, context=context
        )
        short_losses = inputs.scores.read if inputs.scores is not None else None
        self.batches = BatchMaker(config, ranks, context_options(config, ranks, context), short_losses, inputs.bos_id)
        self.checkpointer = Checkpointer(self.model, self.optimizer, config, ranks)
        self.began = self.position = self._restore()
        self.records = self._open_records(built.machine)
        self.incidents = self._open_incidents()
        self.early = self._open_early_stopping()
        valid = inputs.rows.valid
        self.validation = Validation(config, self.stepper, self.batches, valid, self.records, self.early)
        self.under_way: deque[UnderWay] = deque()  # the oldest first
        self.landed = 0.0  # when the step before the oldest was seen to be done
        self.trajectory: Trajectory | None = None
        if config.checkpoint.dump_trajectory:
            self.trajectory = Trajectory(
                folder=Path(config.checkpoint.dump_trajectory),
                chunks=chunks,
                config=config,
                vocab_size=inputs.vocab_size,
                ranks=ranks,
                row_at=inputs.rows.train,
                weigher=self.stepper.weigher,
            )

    def _restore(self) -> Position:
        """Take up what the run begins with beside its weights, and say where in the run that is."""
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

    def _open_records(self, machine: Machine) -> RunRecords:
        """Open what is told of the run; a folder that process 0 cannot use ends all processes."""
        records, folder = RunRecords(self.config, machine, self.position.step, first=self.ranks.world == 0), self.folder
        if folder is not None:
            parallel.run_on_rank0(self.ranks, lambda: records.open(folder), folder)
        return records

    def _open_incidents(self) -> Incidents:
        """Watch over the losses, from those on that a continued run has recorded."""
        folder, step, before = self._own_folder(), self.position.step, Past()
        if folder is not None:
            count = self.config.training.spike_window
            before = parallel.run_on_rank0(self.ranks, lambda: past(folder, step, count), folder, reads=True)
        return Incidents(self.config, before, self.records)

    def _open_early_stopping(self) -> EarlyStopping:
        """Count validations without improvement, from those on that a continued run has recorded."""
        folder, step = self._own_folder(), self.position.step
        if folder is None:
            return early_stopping(self.config, None, step)
        return parallel.run_on_rank0(self.ranks, lambda: early_stopping(self.config, folder, step), folder, reads=True)

    def fit(self, request: StopRequest, *, run: Path | None, goes_on: bool) -> Ending:
        """Do every step that is left, or those until it stops early; save in the end and where the run is asked to."""
        try:
            with only_new_garbage():
                stopping = self._fit(request)
        except DivergedError as error:  # all processes come here, and nothing is saved any more
            return self._diverged(error)
        return self._finish(stopping, run, goes_on)

    def _fit(self, request: StopRequest) -> int:
        """Return the signal that has stopped the run before its last step; 0 for none."""
        last = self.config.training.train_iters
        if self.trajectory is not None:
            self.trajectory.begin(self.position.step)
        stopping = self.validation.before_training(self.position.step, request, continued=self._own_folder())
        with Prefetch(self.make_batches, last) as prefetch:
            while self.position.step < last and not stopping and self.early.reason is None:
                self._launch(prefetch, request)
                step = self.position.step
                # what is validated or dumped is of steps whose results are known, and so is what is saved
                # and before a step that may be skipped, those before it
                known = self.validation.is_due(step) or self.trajectory is not None or self.incidents.may_skip
                agreed = self._land(0 if known else self.platform.steps_ahead)
                stopping = agreed.signal
                due = self.checkpointer.poll(step, writing=agreed.writing, by_clock=agreed.by_clock)
                due = due or step == last
                if stopping or due:
                    stopping = self._land(0).signal or stopping
                if stopping or due:  # before the validation, which may outlast the time that a warning leaves
                    self._save()
                if not stopping:
                    stopping = self.validation.after_step(step, request)
                    if (stopping or self.early.reason is not None) and not due:
                        self._save()
        return stopping

    def _own_folder(self) -> Path | None:
        """Return the run's folder where the run continues from a checkpoint inside it."""
        source = self.inputs.checkpoint
        if source is None or self.folder is None or source.run.resolve() != self.folder.resolve():
            return None
        return self.folder

    def _launch(self, prefetch: Prefetch[StepBatches], request: StopRequest) -> None:
        """Give the device the next step of the run."""
        began = time.perf_counter()
        before, step = self.position, self.position.step
        heartbeat.beat(f"step {step}")
        batches = prefetch.take(step)
        waited = time.perf_counter() - began
        learning_rate = self.learning_rate.at(step)
        set_learning_rate(self.optimizer, learning_rate, self.config.optimizer.weight_decay)
        self.traffic.take()  # a validation's is not the step's
        launched = self.stepper.launch(batches, self.incidents.accepts if self.incidents.may_skip else None)
        values = torch.cat([launched.values, self._of_all_processes(request.asked)])
        self.position = Position(step + 1, before.consumed_samples + self.config.data.global_batch_size)
        self.under_way.append(
            UnderWay(
                before=before,
                after=self.position,
                learning_rate=learning_rate,
                launched=launched,
                reading=Reading(values),
                began=began,
                waited_seconds=waited,
                save_stall_seconds=self.checkpointer.take_stall(),
                threads=self.checkpointer.threads,
            )
        )

    def _land(self, ahead: int) -> Agreed:
        """Wait for the results of all steps under way but the last `ahead`, and record them.

        Raises:
            DivergedError: the run cannot go on after a step; `position` is then what came before it.
        """
        agreed = Agreed()
        while len(self.under_way) > ahead:
            step = self.under_way.popleft()
            *values, asked, writing, by_clock, peak_memory, cp_bytes = step.reading.values()
            result = step.launched.result(values)
            now = time.perf_counter()
            number, first_sample = step.before.step, self.first_sample(step.before.step)
            samples = range(first_sample, first_sample + self.config.data.global_batch_size)
            mixed = self.inputs.rows.mixed
            done = FinishedStep(
                step=number,
                samples=samples,
                source_rows=mixed.rows_of(samples) if mixed is not None and self.ranks.world == 0 else None,
                consumed_samples=step.after.consumed_samples,
                window=self.window.window_at(number),
                learning_rate=step.learning_rate,
                result=result,
                signal=int(asked),
                cp_bytes=int(cp_bytes),
                peak_memory_bytes=int(peak_memory),
                seconds=now - max(step.began, self.landed),
                waited_seconds=step.waited_seconds,
                save_stall_seconds=step.save_stall_seconds,
            )
            self.landed = now
            done, ends = self.incidents.landed(done)
            if ends is not None:
                self.position = step.before
                raise ends
            self.records.step(done)
            if self.trajectory is not None:
                self.trajectory.step(done)
            # a step ahead, it was said before the last result began to be published
            outdated = step.threads != self.checkpointer.threads
            agreed = Agreed(agreed.signal or done.signal, writing=bool(writing) or outdated, by_clock=bool(by_clock))
        return agreed

    def make_batches(self, step: int) -> StepBatches:
        """Make this rank's batches of a step; another thread does, while the step before is computed."""
        return self.batches.train(self.inputs.rows.train, step, self.first_sample(step), self.window.window_at(step))

    def first_sample(self, step: int) -> int:
        """Return the first row of a step: rows follow one another, also where a resumed run's batches are larger."""
        data = self.config.data
        consumed = self.began.consumed_samples + (step - self.began.step) * data.global_batch_size
        return data.first_sample + consumed

    def _of_all_processes(self, stop_asked: int) -> Tensor:
        """Return the entries of `Agreed`, the largest peak memory and all context-parallel bytes; float64 [5]."""
        on_cuda = self.platform.device.type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated() if on_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        mine = to_device([stop_asked, *self.checkpointer.standing(), peak, self.traffic.take()], self.platform.device)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        dist.all_gather(everyone, mine)
        of_all = torch.stack(everyone)
        return torch.cat([of_all[:, :-1].amax(dim=0), of_all[:, -1:].sum(dim=0)])

    def _save(self) -> None:
        """Begin a checkpoint of what has been done, where the run has a folder."""
        if self.folder is not None:
            heartbeat.beat(f"saving after {self.position.step} steps")
            self._write_passage(self.folder)
            self.checkpointer.save(self.folder, self.position)

    def _write_passage(self, folder: Path) -> None:
        """Write passage.json: some tokens of one row with their weights, from where they were weighed last."""
        if not self.ranks.shows_passage:
            return
        model = self.config.data.tokenizer_model
        passage = self.stepper.weigher.passage(self.position.step - 1, Tokenizer(model) if model else None)
        if passage is not None:
            passage.write(folder)

    def _finish(self, stopping: int, run: Path | None, goes_on: bool) -> Ending:
        """Publish the last checkpoint, say how the run has ended, and close what it writes."""
        heartbeat.beat(f"the end after {self.position.step} steps")
        self.checkpointer.finish()
        step = self.position.step
        left = goes_on or step < self.config.training.train_iters or self.validation.is_due(step)
        ending = Ending(stopping if left else 0, step, self.checkpointer.saved)
        early = self.early.reason if step < self.config.training.train_iters else None
        if ending.signal:
            kept = f"saved after {step} steps" if ending.checkpoint else "nothing saved: no --save folder"
            again = f" in {ending.checkpoint}; {as_flag('load', run)} goes on from there" if ending.checkpoint else ""
            self.records.note(f"stopped by a signal; {kept}{again}")
        elif not keeps_weights(self.config):
            self.records.note("warning: the weights are lost: the run had no --save folder")
        elif self.began.step == step and not goes_on:
            done = f"all {step:,} steps were done before; --train-iters N for more"
            if early is not None:
                patience = self.config.training.early_stopping_patience
                done = f"the run stopped early before; --early-stopping-patience N above {patience} for more"
            self.records.note(f"nothing is left to do: {done}")
        elif ending.checkpoint is not None and not goes_on:
            folder = shlex.quote(str(self.folder))
            self.records.note(
                f"done: the model after {step:,} steps is in {ending.checkpoint}; {program('report')} {folder} "
                f"shows how it went, {program('convert')} megatron-to-hf --input {folder} --output MODEL exports it"
            )
        if self.trajectory is not None:
            settle_parameters(self.model)
            self.trajectory.weights("final")
        if self.folder is not None:
            self._write_passage(self.folder)
        if early is not None and not ending.signal:
            self.records.note(f"{early}; {step} of {self.config.training.train_iters} steps done")
        how = f"stopped by {signal.Signals(ending.signal).name}" if ending.signal else early or "done"
        self.records.close(step, how)
        return ending

    def _diverged(self, error: DivergedError) -> Ending:
        """End a run whose numbers are no longer finite."""
        self.checkpointer.finish()
        self.records.close(self.position.step, f"diverged: the {error.what} was {error.value}")
        begun_from = self.inputs.checkpoint
        saved = self.checkpointer.saved or (begun_from.folder if begun_from is not None else None)
        return Ending(0, self.position.step, saved, Divergence(error.what, error.value, error.needs))
