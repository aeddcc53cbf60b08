"""One step of a run once more: from the newest checkpoint before it, over the rows between, to its loss and gradients.

RUN/config.yaml, RUN/checkpoints -> steps up to the one asked for, those that were skipped skipped again -> the loss of
each of its tokens -> forward and backward, no update -> its numbers beside those that were recorded

Rows are a function of seed and sample and the checkpoint restores all else: the same layout gives the same numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from tqdm import tqdm

from megatron_ext.arrays import Float32
from megatron_ext.batch import PackedBatch
from megatron_ext.checkpoint.folders import Checkpoint, folder_name, read_checkpoint, saved_steps
from megatron_ext.config import CheckpointConfig, Config
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine import parallel
from megatron_ext.engine.gradients import gradient_norms
from megatron_ext.engine.optimizer import set_learning_rate
from megatron_ext.engine.step import StepResult
from megatron_ext.engine.transfer import Reading
from megatron_ext.errors import UserError
from megatron_ext.files.aside import folder_aside
from megatron_ext.monitoring.metrics import METRICS_FILE, read_by_step
from megatron_ext.run.incidents import incident_folder
from megatron_ext.run.rows import row_arrays
from megatron_ext.run.train import Trainer, build
from megatron_ext.token_weighting.weigher import short_losses

COMPARED = ("lm_loss", "train_loss", "grad_norm")
EXCERPT = 24  # tokens of a document that are shown


@dataclass(frozen=True)
class Passage:
    """Says how a row, or a document of one, was predicted.

    Attributes:
        sample: the row's sample index.
        first, end: its tokens are those of the row from `first` up to `end`.
        trained: labels among them that count in the loss.
        loss: the mean of theirs, in nats.
        tokens: the first of them.
        text: the same as text; None without a tokenizer.
    """

    sample: int
    first: int
    end: int
    trained: int
    loss: float
    tokens: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class Replay:
    """Holds a step's numbers, computed once more.

    Attributes:
        step, window, learning_rate: of the step.
        checkpoint: that the replay began from; None for the run's first weights.
        replayed: `COMPARED` as computed here.
        recorded: as the run recorded them; None for what was not finite.
        source: the file that has these.
        same_rows: whether the rows are those that the incident kept; None where there is none.
        rows, documents: the largest mean loss first.
        gradient_norms: before clipping, by part of the model; None where ranks hold parts of the gradients.
    """

    step: int
    window: int
    learning_rate: float
    checkpoint: str | None
    replayed: dict[str, float]
    recorded: dict[str, float | None]
    source: str
    same_rows: bool | None
    rows: tuple[Passage, ...]
    documents: tuple[Passage, ...]
    gradient_norms: dict[str, float] | None

    @property
    def error(self) -> float:
        """The largest relative difference of a number to the recorded one; inf where one alone is finite."""
        return max(_error(self.replayed[name], self.recorded[name]) for name in COMPARED)


def _error(ours: float, theirs: float | None) -> float:
    if theirs is None or not math.isfinite(ours):
        return 0.0 if theirs is None and not math.isfinite(ours) else math.inf
    return abs(ours - theirs) / (abs(theirs) or 1.0)


def configuration(run: Path, step: int, config: Config) -> tuple[Config, Checkpoint | None]:
    """Return the run's configuration, its config.yaml with flags, as a replay of a step needs it, and where it begins.

    Raises:
        UserError: a step that the run does not have.
    """
    if not 0 <= step < config.training.train_iters:
        raise UserError(
            f"step: got {step}, needs one of the {config.training.train_iters} steps of {run}, counted from 0"
        )
    steps = [saved for saved in saved_steps(run) if saved <= step]
    checkpoint = read_checkpoint(run / "checkpoints" / folder_name(steps[-1])) if steps else None
    options = config.checkpoint
    begins = CheckpointConfig(override=options.override, verify_load=options.verify_load)
    if checkpoint is not None:
        begins = replace(begins, load=str(checkpoint.folder))
    else:  # as the run itself began
        load = None if _own(options.load, run) else options.load
        begins = replace(begins, load=load, init_from=options.init_from, init_optimizer=options.init_optimizer)
    return (
        replace(
            config,
            checkpoint=begins,
            training=replace(config.training, eval_interval=0),
            data=replace(config.data, valid_data_path=()),
            # what is measured stays: QK-Clip needs it
            logging=replace(config.logging, tensorboard=False, wandb_project=None, mlflow_experiment=None),
            # whole gradients on every rank, to be told apart by parameter
            parallel=config.parallel
            if config.optimizer.use_precision_aware_optimizer
            else replace(
                config.parallel, use_distributed_optimizer=False, overlap_grad_reduce=False, overlap_param_gather=False
            ),
        ),
        checkpoint,
    )


def _own(load: str | None, run: Path) -> bool:
    return load is not None and run.resolve() in (Path(load).resolve(), *Path(load).resolve().parents)


def replay(run: Path, step: int, config: Config, *, most: int, output: Path | None) -> Replay:
    """Replay a step; all processes call it, and get the result.

    Args:
        run: its folder.
        step: from 0.
        config: of `configuration`.
        most: rows and documents to name.
        output: folder for replay.json and losses.npz; None for neither.

    Raises:
        UserError: no record of the step, or what a run refuses to continue from.
    """
    recorded, source = _recorded(run, step)
    skipped = _skipped(run)
    built = build(config)
    trainer, ranks, inputs = Trainer(config, built), built.ranks, built.inputs
    begun = trainer.position.step
    for number in tqdm(range(begun, step), unit="step", disable=ranks.world != 0):
        _step(trainer, number, changes=number not in skipped)
    losses = _token_losses(trainer, step)
    result = _step(trainer, step, changes=False)
    whole = not config.optimizer.use_precision_aware_optimizer
    norms = gradient_norms(trainer.model, ranks) if whole else None
    first_sample = trainer.first_sample(step)
    samples = range(first_sample, first_sample + config.data.global_batch_size)
    rows = {sample: inputs.rows.train(sample) for sample in samples}
    model = config.data.tokenizer_model
    tokenizer = Tokenizer(model) if model else None
    window = trainer.window.window_at(step)
    kept = incident_folder(run, step) / "rows.npz"
    made = Replay(
        step=step,
        window=window,
        learning_rate=trainer.learning_rate.at(step),
        checkpoint=None if inputs.checkpoint is None else str(inputs.checkpoint.folder),
        replayed={"lm_loss": result.loss.lm_loss, "train_loss": result.loss.train_loss, "grad_norm": result.grad_norm},
        recorded=recorded,
        source=str(source),
        same_rows=_same(kept, list(rows.values()), window) if kept.is_file() else None,
        rows=_largest([_passage(s, rows[s], 0, len(losses[s]), losses[s], tokenizer) for s in samples], most),
        documents=_largest(
            [passage for s in samples for passage in _documents(s, rows[s], losses[s], tokenizer)], most
        ),
        gradient_norms=norms,
    )
    if output is not None and ranks.world == 0:
        with folder_aside(output) as aside:
            (aside / "replay.json").write_text(json.dumps(_plain(asdict(made)), indent=2) + "\n")
            arrays = row_arrays(list(rows.values()), window)
            arrays |= {"sample": np.array(samples), "losses": np.stack([losses[s] for s in samples])}
            np.savez(aside / "losses.npz", **arrays)
    trainer.records.close(step, "a replay")
    parallel.stop()
    return made


def _step(trainer: Trainer, number: int, *, changes: bool) -> StepResult:
    """Do a step of the run, with or without its update."""
    set_learning_rate(trainer.optimizer, trainer.learning_rate.at(number), trainer.config.optimizer.weight_decay)
    launched = trainer.stepper.launch(trainer.make_batches(number), None if changes else lambda _: False)
    return launched.result(Reading(launched.values).values())


def _token_losses(trainer: Trainer, step: int) -> dict[int, Float32]:
    """Compute -log p(label) of every token of a step's global batch before its update, by sample; float32 [L] each."""
    length, ranks, device = trainer.config.data.seq_length, trainer.ranks, trainer.platform.device
    samples, made = trainer.batches.whole(
        trainer.inputs.rows.train, trainer.first_sample(step), trainer.window.window_at(step)
    )
    batches: list[PackedBatch] = [batch.to(device) for batch in made]
    of_batches = trainer.stepper.pipeline.token_losses(batches)
    mine: dict[int, Float32] = {}
    for group, batch, losses in zip(samples, batches, of_batches, strict=False):  # losses on the last stage alone
        context = trainer.stepper.context
        whole = short_losses(context, [batch], [losses], length * len(group), device).view(len(group), length)
        mine |= dict(zip(group, whole.cpu().numpy(), strict=True))
    everyone: list[dict[int, Float32]] = [{}] * ranks.world_size
    dist.all_gather_object(everyone, mine if ranks.reports_loss and ranks.context == 0 else {})
    return {sample: loss for one in everyone for sample, loss in one.items()}


def _documents(sample: int, row: TokenRow, losses: Float32, tokenizer: Tokenizer | None) -> list[Passage]:
    """Cut a row at its documents' ends."""
    length = len(losses)
    ends = sorted({*(int(end) for end in row.document_ends if end < length), length})
    firsts = [0, *ends[:-1]]
    return [_passage(sample, row, first, end, losses, tokenizer) for first, end in zip(firsts, ends, strict=True)]


def _passage(
    sample: int, row: TokenRow, first: int, end: int, losses: npt.NDArray[np.float32], tokenizer: Tokenizer | None
) -> Passage:
    counted = losses[first:end][row.trained[first:end]].astype(np.float64)
    tokens = tuple(row.tokens[first : min(end, first + EXCERPT)].tolist())
    return Passage(
        sample=sample,
        first=first,
        end=end,
        trained=len(counted),
        loss=float(counted.mean()) if len(counted) else 0.0,
        tokens=tokens,
        text=tokenizer.decode(list(tokens)) if tokenizer is not None else None,
    )


def _largest(passages: Sequence[Passage], most: int) -> tuple[Passage, ...]:
    """Return those with the largest loss, one that is not a number before all; those without a trained token last."""

    def rank(passage: Passage) -> tuple[bool, float]:
        return passage.trained > 0, passage.loss if not math.isnan(passage.loss) else math.inf

    return tuple(sorted(passages, key=rank, reverse=True)[:most])


def _recorded(run: Path, step: int) -> tuple[dict[str, float | None], Path]:
    """Read what the run recorded of a step: its metrics, or its incident: one that ended the run has no metrics."""
    metrics = run / METRICS_FILE
    for record in read_by_step(metrics) if metrics.is_file() else ():
        if record["step"] == step:
            return {name: record[name] for name in COMPARED}, metrics
    incident = incident_folder(run, step) / "incident.json"
    if incident.is_file():
        facts = json.loads(incident.read_text())
        return {name: facts[name] for name in COMPARED}, incident
    raise UserError(f"step: got {step}, needs one that {metrics} or {incident} has a record of; name another")


def _skipped(run: Path) -> set[int]:
    """List the steps of a run whose update was refused."""
    metrics = run / METRICS_FILE
    records = read_by_step(metrics) if metrics.is_file() else ()
    return {record["step"] for record in records if record.get("skipped") and record["denominator"] != 0}


def _same(kept: Path, rows: Sequence[TokenRow], window: int) -> bool:
    """Tell whether rows are, to the bit, those that an incident kept."""
    with np.load(kept) as file:
        return all(np.array_equal(file[name], value) for name, value in row_arrays(rows, window).items())


def _plain(value: Any) -> Any:
    """Turn numbers that JSON has no word for into null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
