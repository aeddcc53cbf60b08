"""Recompute the rows of a step from (seed, sample), and their losses under the newest weights saved before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.arrays import Float32
from megatron_ext.checkpoint.folders import folder_name, read_checkpoint, saved_steps
from megatron_ext.config import CheckpointConfig, Config, LoggingConfig, ParallelConfig
from megatron_ext.config.arguments import from_dict
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine import parallel
from megatron_ext.engine.optimizer import in_precision
from megatron_ext.engine.pipeline import Pipeline
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import METRICS_FILE, read_by_step
from megatron_ext.run.batches import BatchMaker
from megatron_ext.run.trainer import build


@dataclass(frozen=True)
class Passage:
    """The model's loss on a document of a row.

    Attributes:
        sample: the row's sample index.
        first, end: the document's tokens within the row.
        trained: number of labels among them that count in the loss.
        loss: mean over these labels, in nats; 0 if there are none.
        text: the decoded tokens, or token ids without a tokenizer.
    """

    sample: int
    first: int
    end: int
    trained: int
    loss: float
    text: str


@dataclass(frozen=True)
class StepRows:
    """The training data of a step.

    Attributes:
        window: of the step.
        recorded: the step's line in metrics.jsonl; empty if the run ended in this step.
        weights: checkpoint used for the losses; None: the run's initial weights.
        documents: of all rows, in order.
    """

    window: int
    recorded: dict[str, Any]
    weights: Path | None
    documents: list[Passage]


def inspect_step(run: Path, step: int, today: Config) -> StepRows:
    """Recompute the rows of a step and the losses of their tokens, on one process.

    Args:
        run: the run's folder.
        step: counted from 0.
        today: configuration in RUN/config.yaml. Options may have changed since then: the next checkpoint's are used.

    Raises:
        UserError: the run has no record of the step or the one before it; data or weights cannot be read.
    """
    metrics = run / METRICS_FILE
    records = {record["step"]: record for record in read_by_step(metrics)} if metrics.is_file() else {}
    if step < 0 or (step not in records and step - 1 not in records):
        raise UserError(f"step: got {step}, needs one that {metrics} has; name another")
    saved = saved_steps(run)
    before, after = [n for n in saved if n <= step], [n for n in saved if n > step]
    config = today
    if after:
        config = from_dict(read_checkpoint(run / "checkpoints" / folder_name(after[0])).manifest.config)
    recorded = records.get(step, {})
    rows = config.data.global_batch_size
    first = records[step - 1]["consumed_samples"] if step - 1 in records else recorded["consumed_samples"] - rows
    end = recorded.get("consumed_samples", first + rows)
    window = config.window_schedule().window_at(step)
    weights = run / "checkpoints" / folder_name(before[-1]) if before else None
    options = CheckpointConfig(init_from=str(weights) if weights is not None else config.checkpoint.init_from)
    config = replace(
        config,
        checkpoint=options,
        training=replace(config.training, eval_interval=0),
        logging=LoggingConfig(tensorboard=False),
        optimizer=replace(config.optimizer, qk_clip_threshold=None),
        parallel=ParallelConfig(device=config.parallel.device),
    )
    samples = range(config.data.first_sample + first, config.data.first_sample + end)
    return StepRows(window, recorded, weights, list(_documents(config, samples, window)))


def _documents(config: Config, samples: range, window: int) -> Iterator[Passage]:
    """Yield the documents of some rows."""
    built = build(config)
    batches = BatchMaker(config, built.ranks, None)
    pipeline = Pipeline([in_precision(chunk, config) for chunk in built.chunks])
    model = config.data.tokenizer_model
    tokenizer = Tokenizer(model) if model else None
    for sample in samples:
        row = built.inputs.rows.train(sample)
        (loss_t,) = pipeline.token_losses([batches.row(row, window).to(built.platform.device)])
        losses = loss_t.cpu().numpy()
        ends = sorted({*(int(end) for end in row.document_ends if end < len(losses)), len(losses)})
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            yield _passage(sample, row, first, end, losses, tokenizer)
    parallel.stop()


def _passage(sample: int, row: TokenRow, first: int, end: int, losses: Float32, tokenizer: Tokenizer | None) -> Passage:
    counted = losses[first:end][row.trained[first:end]]
    tokens = row.tokens[first:end].tolist()
    return Passage(
        sample=sample,
        first=first,
        end=end,
        trained=len(counted),
        loss=math.fsum(counted) / max(len(counted), 1),
        text=tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens)),
    )
