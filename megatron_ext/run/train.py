"""The training run: `train` opens and builds everything, `Trainer.fit` is the loop.

open what is read -> join the processes -> build the model -> Trainer: restore -> fit: step, record, save, validate
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext import rope
from megatron_ext.batch import StepBatches
from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.config import Config
from megatron_ext.config.warnings import keeps_weights, warnings_of
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine import compat, environment, parallel, platform
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, settle_parameters, wrap
from megatron_ext.engine.state import Checkpointer, Position, load_weights
from megatron_ext.engine.step import DivergedError, Stepper
from megatron_ext.engine.weights import initialise
from megatron_ext.run.batches import BatchMaker, context_options
from megatron_ext.run.evaluation import Validation
from megatron_ext.run.inputs import Inputs, open_inputs
from megatron_ext.run.prefetch import Prefetch
from megatron_ext.run.records import FinishedStep, RunRecords
from megatron_ext.run.signals import Divergence, Ending, StopRequest
from megatron_ext.run.trajectory import Trajectory

logger = logging.getLogger(__name__)


def train(config: Config, request: StopRequest, *, goes_on: bool = False) -> Ending:
    """Run the configuration from its start, or from a checkpoint, to its last step or a signal.

    The processes stay joined.

    Args:
        config: of the run, or of one stage.
        request: notes signals from here on, for the stages after this one too.
        goes_on: another stage follows, which a signal during the last step must stop.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
    """
    compat.check_version()
    where = platform.choose(config.parallel.device)
    compat.install_optimizer()
    inputs = open_inputs(config)
    ranks = parallel.start(config.parallel, config.model.num_layers, where, config.training.seed)
    chunks = build_chunks(config, inputs.vocab_size, where)
    initialise(chunks, config.model, inputs.vocab_size, config.training.seed, ranks)
    if inputs.pretrained is not None:
        load_weights(chunks, inputs.pretrained, ranks)
    announce(config, where, ranks, inputs)
    request.listen()
    trainer = Trainer(config=config, where=where, ranks=ranks, inputs=inputs, chunks=chunks)
    ending = trainer.fit(request, goes_on=goes_on)
    parallel.finish_stage()
    return ending


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
    logger.info("device %s, %s", where.device.type, where.communication)
    logger.info(
        f"{count_parameters(config.model, inputs.vocab_size):,} parameters on {ranks.world_size} processes: "
        f"TP {ranks.tensor_size} x PP {ranks.pipeline_size} x CP {ranks.context_size} x DP {ranks.data_size}"
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


class Trainer:
    """Does one process's part of a run; when it is built, its model is where the run begins or continues.

    Args:
        config: the run's, or a stage's.
        where, ranks: where this process computes and stands.
        inputs: what the run reads.
        chunks: the model of this pipeline stage, with its first weights.
    """

    def __init__(
        self,
        config: Config,
        where: platform.Platform,
        ranks: parallel.Ranks,
        inputs: Inputs,
        chunks: Sequence[PackedGPT],
    ) -> None:
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
        self.records = RunRecords(config, self.folder, self.position.step, first=ranks.world == 0)
        self.validation = Validation(config, self.stepper, self.batches, inputs.rows.valid, self.records)
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
        if self.folder is not None:
            self.checkpointer.prepare(self.folder)
        if self.inputs.checkpoint is not None:
            return self.checkpointer.load(self.inputs.checkpoint)
        if self.inputs.pretrained is not None and self.config.checkpoint.init_optimizer:
            self.checkpointer.load_optimizer(self.inputs.pretrained)
            if self.ranks.world == 0:
                logger.info("optimizer state from %s", self.inputs.pretrained.folder)
        return Position(step=0, consumed_samples=0)

    def fit(self, request: StopRequest, *, goes_on: bool) -> Ending:
        """Do every step that is left; save at the end and where the configuration or a signal asks."""
        last = self.config.training.train_iters
        if self.trajectory is not None:
            self.trajectory.begin(self.position.step)
        stopping = self.validation.before_training(self.position.step, request, continued=self._own_folder())
        with Prefetch(self._make_batches, last) as prefetch:
            while self.position.step < last and not stopping:
                try:
                    done = self._step(prefetch, request)
                except DivergedError as error:
                    return self._diverged(error)
                self.records.step(done)
                if self.trajectory is not None:
                    self.trajectory.step(done)
                stopping = done.signal
                due = self.checkpointer.poll(self.position.step) or self.position.step == last
                if stopping or due:  # before the validation, which may outlast the time that a warning leaves
                    self._save()
                if not stopping:
                    stopping = self.validation.after_step(self.position.step, request)
                    if stopping and not due:
                        self._save()
        return self._finish(stopping, goes_on)

    def _own_folder(self) -> Path | None:
        """Return the run's folder where the run continues from a checkpoint inside it."""
        source = self.inputs.checkpoint
        if source is None or self.folder is None or source.run.resolve() != self.folder.resolve():
            return None
        return self.folder

    def _step(self, prefetch: Prefetch[StepBatches], request: StopRequest) -> FinishedStep:
        """Do the next step of the run, and agree with the other processes on what it was."""
        began = time.perf_counter()
        step = self.position.step
        batches = prefetch.take(step)
        waited = time.perf_counter() - began
        learning_rate = self.learning_rate.at(step)
        set_learning_rate(self.optimizer, learning_rate, self.config.optimizer.weight_decay)
        self.traffic.take()  # a validation's is not the step's
        result = self.stepper.train(batches)
        signal, peak_memory, cp_bytes = self._of_all_processes(request.asked)
        rows = self.config.data.global_batch_size
        self.position = Position(step + 1, self.position.consumed_samples + rows)
        first_sample = self._first_sample(step)
        return FinishedStep(
            step=step,
            samples=range(first_sample, first_sample + rows),
            consumed_samples=self.position.consumed_samples,
            window=self.window.window_at(step),
            learning_rate=learning_rate,
            result=result,
            signal=signal,
            cp_bytes=cp_bytes,
            peak_memory_bytes=peak_memory,
            seconds=time.perf_counter() - began,
            waited_seconds=waited,
            save_stall_seconds=self.checkpointer.take_stall(),
        )

    def _make_batches(self, step: int) -> StepBatches:
        """Make this rank's batches of a step; another thread does, while the step before is computed."""
        return self.batches.train(self.inputs.rows.train, step, self._first_sample(step), self.window.window_at(step))

    def _first_sample(self, step: int) -> int:
        """Return the first row of a step: rows follow one another, also where a resumed run's batches are larger."""
        data = self.config.data
        consumed = self.began.consumed_samples + (step - self.began.step) * data.global_batch_size
        return data.first_sample + consumed

    def _of_all_processes(self, stop_asked: int) -> tuple[int, int, int]:
        """Return the signal that any process got (0: none), the largest peak memory, all context-parallel bytes."""
        on_cuda = self.platform.device.type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated() if on_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        facts = [float(stop_asked), float(peak), float(self.traffic.take())]
        mine = torch.tensor(facts, dtype=torch.float64, device=self.platform.device)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        dist.all_gather(everyone, mine)
        stops, peaks, sent = torch.stack(everyone).T.tolist()
        return int(max(stops)), int(max(peaks)), int(sum(sent))

    def _save(self) -> None:
        """Begin a checkpoint of what has been done, where the run has a folder."""
        if self.folder is not None:
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

    def _finish(self, stopping: int, goes_on: bool) -> Ending:
        """Publish the last checkpoint, say how the run has ended, and close what it writes."""
        self.checkpointer.finish()
        step = self.position.step
        left = goes_on or step < self.config.training.train_iters or self.validation.is_due(step)
        ending = Ending(stopping if left else 0, step, self.checkpointer.saved)
        if ending.signal:
            kept = f"saved after {step} steps" if ending.checkpoint else "nothing saved: no --save folder"
            self.records.note(f"stopped by a signal; {kept}")
        elif not keeps_weights(self.config):
            self.records.note("warning: the weights are lost: the run had no --save folder")
        if self.trajectory is not None:
            settle_parameters(self.model)
            self.trajectory.weights("final")
        if self.folder is not None:
            self._write_passage(self.folder)
        self.records.close()
        return ending

    def _diverged(self, error: DivergedError) -> Ending:
        """End a run whose next step would spoil the weights, and say so in a line; all processes come here."""
        self.checkpointer.finish()
        begun_from = self.inputs.checkpoint
        saved = self.checkpointer.saved or (begun_from.folder if begun_from is not None else None)
        kept, again = "there is no checkpoint", "start again with"
        if saved is not None:
            kept = f"the newest checkpoint is {saved}"
            again = f"start again with --load {saved} (or an earlier one) and"
        self.records.close()
        self.records.note(
            f"diverged: the {error.what} of step {self.position.step} is {error.value}, needs a finite number; "
            f"{kept}; {again} a lower --lr or --clip-grad, or look at the rows of this step"
        )
        return Ending(0, self.position.step, saved, Divergence(error.what, error.value))
