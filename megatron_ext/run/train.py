"""The training run: built once, then step, record, evaluate, save."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext import rope
from megatron_ext.attention.exchange import Traffic
from megatron_ext.checkpoint.folders import Checkpoint
from megatron_ext.checkpoint.hf.names import count_parameters
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.runs import find_checkpoint
from megatron_ext.config import Config
from megatron_ext.config.arguments import dump_yaml, to_dict
from megatron_ext.config.warnings import keeps_weights, warnings_of
from megatron_ext.data.rows.identity import open_scores, vocabulary
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine import compat, environment, parallel, platform
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, settle_parameters, wrap
from megatron_ext.engine.state import Checkpointer, Position, load_weights
from megatron_ext.engine.step import DivergedError, Stepper, StepResult
from megatron_ext.engine.weights import initialise
from megatron_ext.evaluation.by_position import PositionLosses, evaluation_record
from megatron_ext.monitoring.metrics import MetricsWriter, evaluated
from megatron_ext.monitoring.progress import Progress
from megatron_ext.run.batches import BatchMaker, Rows, StepBatches, context_options, open_rows
from megatron_ext.run.prefetch import Prefetch
from megatron_ext.run.signals import Divergence, Ending, StopRequest
from megatron_ext.run.trajectory import Trajectory
from megatron_ext.token_weighting.store import ScoreStore

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
    source = find_checkpoint(config)
    vocab_size = vocabulary(config)
    rows = open_rows(config, vocab_size)
    store = open_scores(config, vocab_size)
    ranks = parallel.start(config.parallel, config.model.num_layers, where, config.training.seed)
    run = Run(config, where, ranks, vocab_size, rows, store, source)
    request.listen()
    run.begin()
    ending = run.loop(request, goes_on=goes_on)
    parallel.finish_stage()
    return ending


def check_data(config: Config) -> None:
    """Open all that a run reads, and close it again.

    Raises:
        UserError: data, plans, a tokenizer or scores that the configuration cannot use.
    """
    vocab_size = vocabulary(config)
    open_rows(config, vocab_size)
    open_scores(config, vocab_size)


class Run:
    """One process's part of a training run."""

    def __init__(
        self,
        config: Config,
        where: platform.Platform,
        ranks: parallel.Ranks,
        vocab_size: int,
        rows: Rows,
        store: ScoreStore | None,
        source: Checkpoint | None,
    ) -> None:
        self.config, self.ranks, self.rows, self.source = config, ranks, rows, source
        self.platform = where
        self.window = config.window_schedule()
        self.learning_rate = config.learning_rate_schedule()
        chunks = build_chunks(config, vocab_size, where)
        initialise(chunks, config.model, vocab_size, config.training.seed, ranks)
        if config.checkpoint.init_from is not None and source is None:
            self._take_weights(Path(config.checkpoint.init_from), chunks, vocab_size)
        self.model = wrap(chunks, config)
        self.optimizer = build_optimizer(self.model, config)
        self.traffic = Traffic()
        self.context = context_options(config, ranks, self.traffic, on_cuda=where.device.type == "cuda")
        self.batches = BatchMaker(config, ranks, self.context, store.read if store is not None else None)
        self.stepper = Stepper(self.model, self.optimizer, where, ranks, config, self.traffic)
        self.checkpointer = Checkpointer(self.model, self.optimizer, config, ranks)
        self.position = Position(step=0, consumed_samples=0)
        self.skipped = 0
        self.unvalidated = False  # said that validation has no trained token
        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        dump = config.checkpoint.dump_trajectory
        self.trajectory = Trajectory(Path(dump), chunks, config, vocab_size, ranks) if dump else None
        self._log_numbers(vocab_size)

    def _take_weights(self, path: Path, chunks: list[PackedGPT], vocab_size: int) -> None:
        pretrained = Pretrained.find(path)
        pretrained.check_shapes(self.config.model, vocab_size)
        load_weights(chunks, pretrained, self.ranks)
        self._log(f"weights from {pretrained.folder}")
        for line in rope.advice(self.config.model, self.config.data.seq_length, pretrained.model, pretrained.length):
            self._log(line)

    def begin(self) -> None:
        """Load the checkpoint, if any, and open what the run writes."""
        options = self.config.checkpoint
        if self.folder is not None:
            self.checkpointer.prepare(self.folder)
        if self.source is not None:
            self.position = self.checkpointer.load(self.source)
        elif options.init_optimizer and options.init_from is not None:
            pretrained = Pretrained.find(Path(options.init_from))
            self.checkpointer.load_optimizer(pretrained)
            self._log(f"optimizer state from {pretrained.folder}")
        self.metrics: MetricsWriter | None = None
        if self.folder is not None and self.ranks.world == 0:
            (self.folder / "config.yaml").write_text(dump_yaml(self.config))
            logging_ = self.config.logging
            self.metrics = MetricsWriter(
                self.folder,
                resume_step=self.position.step,
                tensorboard=logging_.tensorboard,
                wandb_project=logging_.wandb_project,
                wandb_name=logging_.wandb_exp_name,
                config=to_dict(self.config),
            )
        if self.trajectory is not None and not (self.position.step and self.trajectory.has("initial")):
            self.trajectory.weights("initial")

    def loop(self, request: StopRequest, *, goes_on: bool) -> Ending:
        """Every step that is left; a checkpoint at the end and where the configuration or a signal asks."""
        last = self.config.training.train_iters
        self.began = self.position
        self.progress = Progress(last, self.position.step, enabled=self.ranks.world == 0)
        stopping = self._evaluate_first(request)
        with Prefetch(self._make_batches, last) as self.prefetch:
            while self.position.step < last and not stopping:
                try:
                    stopping = self._step(request)
                except DivergedError as error:
                    return self._diverged(Divergence(error.what, error.value))
                due = self.checkpointer.poll(self.position.step) or self.position.step == last
                if stopping or due:  # before the evaluation, which may outlast a warning
                    self._save()
                if not stopping:
                    stopping = self._evaluate_if_due(request)
                    if stopping and not due:
                        self._save()
        self.checkpointer.finish()
        left = goes_on or self.position.step < last or self._evaluation_is_due
        ending = Ending(stopping if left else 0, self.position.step, self.checkpointer.saved)
        if ending.signal:
            kept = f"saved after {ending.step} steps" if ending.checkpoint else "nothing saved: no --save folder"
            self.progress.note(f"stopped by a signal; {kept}")
        elif not keeps_weights(self.config):
            self.progress.note("warning: the weights are lost: the run had no --save folder")
        if self.trajectory is not None:
            settle_parameters(self.model)
            self.trajectory.weights("final")
        self._show_passage()
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
        return ending

    def _diverged(self, divergence: Divergence) -> Ending:
        """The end of a run whose next step would spoil the weights, said in a line; all processes come here."""
        self.checkpointer.finish()
        saved = self.checkpointer.saved or (self.source.folder if self.source is not None else None)
        kept, again = "there is no checkpoint", "start again with"
        if saved is not None:
            kept, again = (
                f"the newest checkpoint is {saved}",
                f"start again with --load {saved} (or an earlier one) and",
            )
        self.progress.close()
        self.progress.note(
            f"diverged: the {divergence.what} of step {self.position.step} is {divergence.value}, needs a finite "
            f"number; {kept}; {again} a lower --lr or --clip-grad, or look at the rows of this step"
        )
        if self.metrics is not None:
            self.metrics.close()
        return Ending(0, self.position.step, saved, divergence)

    def _step(self, request: StopRequest) -> int:
        began = time.perf_counter()
        step, first_sample = self.position.step, self._first_sample(self.position.step)
        window, lr = self.window.window_at(step), self.learning_rate.at(step)
        batches = self.prefetch.take(step)
        waited = time.perf_counter() - began
        set_learning_rate(self.optimizer, lr, self.config.optimizer.weight_decay)
        self.traffic.take()  # an evaluation's is not the step's
        result = self.stepper.train(batches)
        if self.trajectory is not None:
            samples = range(first_sample, first_sample + self.config.data.global_batch_size)
            self.trajectory.step(step, samples, self.rows.train, window, self.stepper.weigher.take_rows())
        stopping, peak_memory, cp_bytes = self._agree(request.asked)
        self.position = Position(step + 1, self.position.consumed_samples + self.config.data.global_batch_size)
        seconds = time.perf_counter() - began
        self._record(
            step,
            result,
            window=window,
            learning_rate=lr,
            cp_bytes=cp_bytes,
            peak_memory_bytes=peak_memory,
            step_time_s=seconds,
            data_wait_s=waited,
            save_stall_s=self.checkpointer.take_stall(),
        )
        return stopping

    def _make_batches(self, step: int) -> StepBatches:
        """This rank's batches of a step to come."""
        return self.batches.train(self.rows.train, step, self._first_sample(step), self.window.window_at(step))

    def _first_sample(self, step: int) -> int:
        """The first row of a step that has not been taken yet."""
        data = self.config.data
        consumed = self.began.consumed_samples + (step - self.began.step) * data.global_batch_size
        return data.first_sample + consumed

    def _record(self, step: int, result: StepResult, *, step_time_s: float, **more: float) -> None:
        batch = self.config.data.global_batch_size * self.config.data.seq_length
        record: dict[str, Any] = {
            "step": step,
            "consumed_samples": self.position.consumed_samples,
            "consumed_tokens": self.position.consumed_samples * self.config.data.seq_length,
            "lm_loss": result.loss.lm_loss,
            "train_loss": result.loss.train_loss,
            "segments": result.segments,
            "effective_context": result.effective_context,
            "grad_norm": result.grad_norm,
            "denominator": result.loss.denominator,
            "skipped": int(result.skipped),
            "step_time_s": step_time_s,
            "tokens_per_s": batch / step_time_s,
            **more,
        }
        if self.config.weighting.token_weighting != "none":
            record |= _weight_metrics(result)
        self.progress.update(record)
        if result.skipped and not self.skipped:
            self.progress.note(f"step {step} has no trained token: no weight changed (said once; see `skipped`)")
        self.skipped += result.skipped
        if self.metrics is not None:
            self.metrics.step(record)

    def _evaluate_first(self, request: StopRequest) -> int:
        """The evaluation before the first step, or the one that the run has been stopped before; as the next."""
        step = self.position.step
        if step == 0:
            return self._evaluate_if_due(None)  # cut short, it would leave nothing to continue from
        if self.folder is None or self.source is None or self.source.run.resolve() != self.folder.resolve():
            return 0
        done = [self.ranks.world == 0 and evaluated(self.folder, step)]
        dist.broadcast_object_list(done, src=0)
        return 0 if done[0] else self._evaluate_if_due(request)

    @property
    def _evaluation_is_due(self) -> bool:
        interval, step = self.config.training.eval_interval, self.position.step
        return bool(interval) and (step % interval == 0 or step == self.config.training.train_iters)

    def _evaluate_if_due(self, request: StopRequest | None) -> int:
        """Validate where that is due; the signal that has cut it short, which leaves no record, or 0."""
        if not self._evaluation_is_due:
            return 0
        lengths = sorted(self.config.training.eval_lengths or (self.config.data.seq_length,))
        found: dict[int, list[PositionLosses]] = {length: [] for length in lengths}
        for length, number in itertools.product(lengths, range(self.config.training.eval_iters)):
            stopping = self._any_process(request.asked) if request is not None else 0
            if stopping:
                return stopping
            found[length].append(self._evaluate(number, length))
        self._record_evaluation({length: functools.reduce(operator.add, parts) for length, parts in found.items()})
        return 0

    def _record_evaluation(self, losses: dict[int, PositionLosses]) -> None:
        step = self.position.step
        tokens = self.config.training.eval_iters * self.config.data.global_batch_size * self.config.data.seq_length
        record = evaluation_record(step, tokens, losses)
        if record["valid_loss"] is not None:
            self.progress.note(
                f"validation after {step} steps: loss {record['valid_loss']:.4f} at context {max(losses)}"
            )
        elif not self.unvalidated:
            self.unvalidated = True
            self.progress.note(
                f"validation after {step} steps: no trained token in its rows, so its loss is null (said once); "
                "raise --eval-iters or the second share of --split"
            )
        if self.metrics is not None:
            self.metrics.evaluation(record)

    def _evaluate(self, number: int, length: int) -> PositionLosses:
        """Validation losses of a global batch where attention reaches back at most to the last multiple of `length`."""
        assert self.rows.valid is not None
        trained_window = self.window.window_at(max(self.position.step - 1, 0))
        first = number * self.config.data.global_batch_size
        return self.stepper.evaluate(self.batches.evaluate(self.rows.valid, first, length, trained_window))

    def _show_passage(self) -> None:
        """passage.json: some tokens of one row with their weights, from where they were weighed last."""
        passage = self.stepper.weigher.passage
        if passage is not None and self.folder is not None and self.ranks.shows_passage:
            model = self.config.data.tokenizer_model
            tokenizer = Tokenizer(model) if model else None
            passage.write(self.folder / "passage.json", self.position.step - 1, tokenizer)

    def _save(self) -> None:
        self._show_passage()
        if self.folder is not None:
            self.checkpointer.save(self.folder, self.position)

    def _agree(self, stop_asked: int) -> tuple[int, int, int]:
        """The signal that any process got (0: none), the largest peak memory, and all context-parallel bytes."""
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

    def _any_process(self, number: int) -> int:
        """The largest of all processes' numbers."""
        largest = torch.tensor(number, device=self.platform.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def _log(self, text: str) -> None:
        if self.ranks.world == 0:
            logger.info(text)

    def _log_numbers(self, vocab_size: int) -> None:
        data, ranks = self.config.data, self.ranks
        for line in environment.report(self.config, self.platform, ranks.world_size):
            self._log(line)
        self._log(f"device {self.platform.device.type}, {self.platform.communication}")
        self._log(
            f"{count_parameters(self.config.model, vocab_size):,} parameters on {ranks.world_size} processes: "
            f"TP {ranks.tensor_size} x PP {ranks.pipeline_size} x "
            f"CP {ranks.context_size} x DP {ranks.data_size}"
        )
        self._log(
            f"{data.global_batch_size * data.seq_length:,} tokens per step: {data.global_batch_size} rows of "
            f"{data.seq_length:,}, {self.config.microbatches(ranks.world_size)} micro-batches per rank"
        )
        schedule = self.window
        self._log(
            f"window: {schedule.kind.value}, {schedule.window_at(0):,} at step 0, {schedule.end:,} from step "
            f"{schedule.expansion_steps:,} of {self.config.training.train_iters:,} on"
        )
        for line in warnings_of(self.config) if ranks.world == 0 else ():
            logger.warning("warning: %s", line)


def _weight_metrics(result: StepResult) -> dict[str, float]:
    loss = result.loss
    count = loss.token_count or 1.0
    return {
        "weight_std": loss.weight_std,
        "weight_max": result.weight_max,
        "zero_share": loss.zero_count / count,
        "score_mean": loss.score_sum / count,
        "score_time_s": result.score_seconds,
    }
