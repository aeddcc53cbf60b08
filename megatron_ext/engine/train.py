"""The training run: built once, then step, record, evaluate, save."""

from __future__ import annotations

import logging
import math
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.arguments import dump_yaml, to_dict
from megatron_ext.attention.exchange import Traffic
from megatron_ext.checkpoint.names import count_parameters
from megatron_ext.config import Config
from megatron_ext.data.tokenizer import Tokenizer
from megatron_ext.engine import compat, parallel, platform
from megatron_ext.engine.identity import row_identity, vocabulary
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, wrap
from megatron_ext.engine.prefetch import Prefetch
from megatron_ext.engine.pretrained import Pretrained
from megatron_ext.engine.rows import BatchMaker, RowAt, Rows, StepBatches, context_options, open_rows
from megatron_ext.engine.signals import StopRequest
from megatron_ext.engine.state import Checkpointer, Position, latest
from megatron_ext.engine.step import Stepper, StepResult
from megatron_ext.engine.trajectory import Trajectory
from megatron_ext.engine.weights import initialise
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import MetricsWriter
from megatron_ext.monitoring.progress import Progress
from megatron_ext.token_weighting.store import ScoreStore

logger = logging.getLogger(__name__)


def train(config: Config) -> None:
    """Run the configuration from its start, or from a checkpoint, to its last step or a signal.

    Raises:
        UserError: data, tokenizer or checkpoint that the configuration cannot use.
    """
    compat.check_version()
    where = platform.choose(config.parallel.device)
    compat.install_optimizer()
    source = _find_checkpoint(config)
    vocab_size = vocabulary(config)
    rows = open_rows(config, vocab_size)
    store = _open_scores(config, vocab_size)
    ranks = parallel.start(config.parallel, config.model.num_layers, where, config.training.seed)
    run = Run(config, where, ranks, vocab_size, rows, store)
    run.begin(source)
    run.loop()
    parallel.stop()


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
    ) -> None:
        self.config, self.ranks, self.rows = config, ranks, rows
        self.platform = where
        self.window = config.window_schedule()
        self.learning_rate = config.learning_rate_schedule()
        chunks = build_chunks(config, vocab_size, where)
        self._first_weights(chunks, vocab_size)
        self.model = wrap(chunks, config)
        self.optimizer = build_optimizer(self.model, config)
        self.traffic = Traffic()
        self.context = context_options(config, ranks, self.traffic, on_cuda=where.device.type == "cuda")
        self.batches = BatchMaker(config, ranks, self.context, store.read if store is not None else None)
        self.stepper = Stepper(self.model, self.optimizer, where, ranks, config, self.traffic)
        self.checkpointer = Checkpointer(self.model, self.optimizer, config, ranks)
        self.position = Position(step=0, consumed_samples=0)
        self.skipped = 0
        self.folder = Path(config.checkpoint.save) if config.checkpoint.save else None
        dump = config.checkpoint.dump_trajectory
        self.trajectory = Trajectory(Path(dump), chunks, config, vocab_size, ranks) if dump else None
        self._log_numbers(vocab_size)

    def _first_weights(self, chunks: list[PackedGPT], vocab_size: int) -> None:
        config, path = self.config, self.config.checkpoint.init_from
        initialise(chunks, config.model, vocab_size, config.training.seed, self.ranks)
        if path is not None:
            pretrained = Pretrained.find(Path(path))
            pretrained.check_shapes(config.model, vocab_size)
            pretrained.load(chunks, self.ranks)
            self._log(f"weights from {pretrained.folder}")

    def begin(self, source: Path | None) -> None:
        """Load the checkpoint, if any, and open what the run writes."""
        if source is not None:
            self.position = self.checkpointer.load(source)
            self._log(f"continuing from {source} after {self.position.step} steps")
        self.metrics: MetricsWriter | None = None
        if self.folder is not None and self.ranks.world == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
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

    def loop(self) -> None:
        """Every step that is left; a checkpoint at the end and where the configuration or a signal asks."""
        last, saved = self.config.training.train_iters, self.position.step
        self.began = self.position
        self.progress = Progress(last, self.position.step, enabled=self.ranks.world == 0)
        if self.position.step == 0:
            self._evaluate_if_due()
        with StopRequest() as request, Prefetch(self._make_batches, last) as self.prefetch:
            stopping = False
            while self.position.step < last and not stopping:
                stopping = self._step(request)
                self._evaluate_if_due()
                interval = self.config.checkpoint.save_interval
                if stopping or self.position.step == last or (interval and self.position.step % interval == 0):
                    saved = self._save()
        if stopping and self.position.step < last:
            kept = f"saved after {saved} steps" if self.folder else "nothing saved: no --save folder"
            self.progress.note(f"stopped by a signal; {kept}")
        if self.trajectory is not None:
            self.trajectory.weights("final")
        self._show_passage()
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()

    def _step(self, request: StopRequest) -> bool:
        began = time.perf_counter()
        step, first_sample = self.position.step, self.position.consumed_samples
        window, lr = self.window.window_at(step), self.learning_rate.at(step)
        batches = self.prefetch.take(step)
        waited = time.perf_counter() - began
        if self.trajectory is not None:
            rows = [self.rows.train(first_sample + row) for row in range(self.config.data.global_batch_size)]
            self.trajectory.step(step, rows, window)
        set_learning_rate(self.optimizer, lr, self.config.optimizer.weight_decay)
        self.traffic.take()  # an evaluation's is not the step's
        result = self.stepper.train(batches)
        stopping, peak_memory, cp_bytes = self._agree(request.asked)
        self.position = Position(step + 1, first_sample + self.config.data.global_batch_size)
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
        )
        return stopping

    def _make_batches(self, step: int) -> StepBatches:
        """This rank's batches of a step to come."""
        first_sample = self.began.consumed_samples + (step - self.began.step) * self.config.data.global_batch_size
        return self.batches.train(self.rows.train, step, first_sample, self.window.window_at(step))

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

    def _evaluate_if_due(self) -> None:
        interval, step = self.config.training.eval_interval, self.position.step
        if not interval or not (step % interval == 0 or step == self.config.training.train_iters):
            return
        assert self.rows.valid is not None
        lengths = self.config.training.eval_lengths or (self.config.data.seq_length,)
        losses = {length: self._evaluate(self.rows.valid, length) for length in sorted(lengths)}
        longest = losses[max(losses)]
        tokens = self.config.training.eval_iters * self.config.data.global_batch_size * self.config.data.seq_length
        record = {
            "step": step,
            "valid_loss": longest,
            "valid_perplexity": math.exp(min(longest, 700.0)),
            "tokens": tokens,
            "by_length": {str(length): loss for length, loss in losses.items()},
        }
        self.progress.note(f"validation after {step} steps: loss {longest:.4f} at context {max(losses)}")
        if self.metrics is not None:
            self.metrics.evaluation(record)

    def _evaluate(self, row_at: RowAt, length: int) -> float:
        """Validation loss where attention reaches back at most to the last multiple of `length`."""
        loss_sum = token_count = 0.0
        for number in range(self.config.training.eval_iters):
            first = number * self.config.data.global_batch_size
            loss = self.stepper.evaluate(self.batches.evaluate(row_at, first, length))
            loss_sum, token_count = loss_sum + loss.loss_sum, token_count + loss.token_count
        return loss_sum / token_count

    def _show_passage(self) -> None:
        """passage.json: some tokens of one row with their weights, from where they were weighed last."""
        passage = self.stepper.weigher.passage
        if passage is not None and self.folder is not None and self.ranks.shows_passage:
            model = self.config.data.tokenizer_model
            tokenizer = Tokenizer(model) if model else None
            passage.write(self.folder / "passage.json", self.position.step - 1, tokenizer)

    def _save(self) -> int:
        self._show_passage()
        if self.folder is not None:
            self.checkpointer.save(self.folder, self.position)
        return self.position.step

    def _agree(self, stop_asked: bool) -> tuple[bool, int, int]:
        """Whether any process was asked to stop, the largest peak memory, and all context-parallel bytes."""
        on_cuda = self.platform.device.type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated() if on_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        facts = [float(stop_asked), float(peak), float(self.traffic.take())]
        mine = torch.tensor(facts, dtype=torch.float64, device=self.platform.device)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        dist.all_gather(everyone, mine)
        stops, peaks, sent = torch.stack(everyone).T.tolist()
        return any(stops), int(max(peaks)), int(sum(sent))

    def _log(self, text: str) -> None:
        if self.ranks.world == 0:
            logger.info(text)

    def _log_numbers(self, vocab_size: int) -> None:
        data, ranks = self.config.data, self.ranks
        layers = "Transformer Engine" if self.platform.transformer_engine else "local"
        self._log(f"device {self.platform.device.type}, {self.platform.communication}, {layers} layers")
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


def _find_checkpoint(config: Config) -> Path | None:
    """The checkpoint that `--load` names, None for a start from scratch."""
    options = config.checkpoint
    found = latest(Path(options.load)) if options.load else None
    if options.load and found is None and not options.load_if_present:
        raise UserError(
            f"load: got {options.load}, which holds no checkpoint; "
            "check the folder, or add --load-if-present to start from scratch"
        )
    same = options.load and options.save and Path(options.load).resolve() == Path(options.save).resolve()
    if options.save and not (found and same) and latest(Path(options.save)) is not None:
        raise UserError(
            f"save: got {options.save}, which holds the checkpoints of another run, needs a folder without; "
            f"add --load {options.save} to continue that run, or choose another folder"
        )
    return found


def _open_scores(config: Config, vocab_size: int) -> ScoreStore | None:
    """The store of a frozen scorer, if the run reads one."""
    path = config.weighting.score_store
    if path is None:
        return None
    rows = config.training.train_iters * config.data.global_batch_size
    return ScoreStore.open(path, rows=rows, **row_identity(config, vocab_size))  # type: ignore[arg-type]
