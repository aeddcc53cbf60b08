"""Recompute the rows of a step from (seed, sample), and their losses under the newest weights saved before it."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_ext.batch import pack
from megatron_ext.checkpoint.folders import folder_name, read_checkpoint, saved_steps, step_of
from megatron_ext.checkpoint.history import read_history
from megatron_ext.config import CheckpointConfig, Config, LoggingConfig, ParallelConfig
from megatron_ext.config.arguments import from_dict
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine import parallel
from megatron_ext.engine.optimizer import in_precision
from megatron_ext.engine.step import Pipeline
from megatron_ext.errors import UserError
from megatron_ext.monitoring.metrics import METRICS_FILE, read_by_step
from megatron_ext.run.trainer import build


def inspect_step(run: Path, step: int, today: Config, characters: int) -> Iterator[str]:
    """Recompute the rows of a step and the losses of their tokens, on one process, and describe them in lines.

    The recorded values come first, then a line for each document, the largest loss first: the mean over its trained
    tokens, in nats, and the first `characters` of its text, or its token ids without a tokenizer.

    `today` is the configuration in RUN/config.yaml. Options may have changed since the step, so the configuration in
    the next checkpoint is used if there is one.

    Raises:
        UserError: the run has no record of the step or the one before it; data or weights cannot be read.
    """
    metrics = run / METRICS_FILE
    records = read_by_step(metrics, (step - 1, step))
    if step < 0 or (step not in records and step - 1 not in records):
        raise UserError(f"step: got {step}, needs one that {metrics} has; name another")
    checkpoints = {saved: run / "checkpoints" / folder_name(saved) for saved in saved_steps(run)}
    before = [folder for saved, folder in checkpoints.items() if saved <= step]
    after = [folder for saved, folder in checkpoints.items() if saved > step]
    config = today
    if after:
        config = from_dict(read_checkpoint(after[0]).manifest.config)
    recorded = records.get(step, {})
    rows = config.data.global_batch_size
    first = records[step - 1]["consumed_samples"] if step - 1 in records else recorded["consumed_samples"] - rows
    end = recorded.get("consumed_samples", first + rows)
    init_from: str | None
    if before:
        weights = init_from = str(before[-1])
    else:
        weights, init_from = _beginning(run, step, today)
    config = replace(
        config,
        checkpoint=CheckpointConfig(init_from=init_from),
        training=replace(config.training, eval_interval=0),
        logging=LoggingConfig(tensorboard=False),
        parallel=ParallelConfig(device=config.parallel.device),
    )
    window = config.window_schedule().window_at(step)
    samples = range(config.data.first_sample + first, config.data.first_sample + end)
    yield f"step {step}, window {window}, losses under {weights}"
    for name in ("lm_loss", "grad_norm", "learning_rate"):
        yield f"{name} recorded: {recorded.get(name, 'nothing')}"
    documents = list(_documents(config, samples, window, characters))
    documents.sort(key=lambda document: math.inf if math.isnan(document[0]) else document[0], reverse=True)
    for loss, description in documents:
        yield f"loss {loss:.4f} {description}"


def _beginning(run: Path, step: int, today: Config) -> tuple[str, str | None]:
    """Name the weights with which a run began that has no checkpoint up to a step; a path, or None for random ones.

    Raises:
        UserError: the run began with a checkpoint that is not there anymore.
    """
    first = "the first weights of the run"
    starts = [start for start in read_history(run).starts if start["step"] <= step]
    if not starts:
        return first, today.checkpoint.init_from
    for start in reversed(starts):
        if not start["step"]:  # earlier versions kept it in config.yaml
            return first, start.get("init_from", today.checkpoint.init_from)
        source = Path(start.get("load", run))
        for folder in (source, source / "checkpoints" / folder_name(start["step"])):
            if step_of(folder) == start["step"] and folder.exists():
                return str(folder), str(folder)
    raise UserError(
        f"step: got {step}, before which {run} has no checkpoint, nor the one it began with; name a later one"
    )


def _documents(config: Config, samples: range, window: int, characters: int) -> Iterator[tuple[float, str]]:
    """Yield the loss of each document of some rows, and its description."""
    built = build(config)
    pipeline = Pipeline([in_precision(chunk, config) for chunk in built.chunks])
    tokenizer = None
    if config.data.tokenizer_model:
        tokenizer = Tokenizer(config.data.tokenizer_model)
    base = None
    if config.model.rope_window_bases:
        base = config.model.rotary_base_at(window)
    for sample in samples:
        row = built.inputs.train.row(sample)
        batch = replace(pack([row], window, config.mask_options()), rotary_base=base)
        (loss_t,) = pipeline.forward_only([batch.to(built.platform.device)])
        losses = loss_t.cpu().numpy()
        ends = sorted({*(int(end) for end in row.document_ends if end < len(losses)), len(losses)})
        for first, end in itertools.pairwise([0, *ends]):
            tokens = row.tokens[first:end].tolist()
            trained = losses[first:end][row.trained[first:end]]
            text = tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))
            yield (
                math.fsum(trained) / max(len(trained), 1),
                f"of {len(trained)} tokens, sample {sample}, tokens {first}..{end - 1}: {text[:characters]!r}",
            )
    parallel.stop()
