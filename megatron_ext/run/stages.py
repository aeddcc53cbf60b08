"""Run the stages of a run, one after another in the same processes."""

from __future__ import annotations

import gc
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.checkpoint.changes import differences
from megatron_ext.checkpoint.folders import locate, older
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.runs import end_of_samples, find_checkpoint
from megatron_ext.config import Config
from megatron_ext.config.arguments import as_flag
from megatron_ext.config.stages import Stage
from megatron_ext.data.rows.identity import vocabulary
from megatron_ext.errors import DivergedError, UserError
from megatron_ext.launch import read_launch, report_to_torchrun
from megatron_ext.monitoring.early_stopping import early_stopping
from megatron_ext.run.inputs import open_inputs
from megatron_ext.run.signals import VALIDATION_LOSS, Ending, StopRequest, unmark
from megatron_ext.run.trainer import train

logger = logging.getLogger(__name__)


def train_stages(stages: Sequence[Stage]) -> int:
    """Train each stage that has steps left, starting with the first; a signal ends all of them.

    Returns:
        The exit status described in run/signals.py.

    Raises:
        UserError: any error of `train`, a folder that a stage cannot write to, or a previous stage that has not ended.
    """
    run = stages[0].run
    if run is not None and read_launch(os.environ).rank == 0:
        unmark(run)
    with StopRequest() as request:
        _check_all(stages)
        ending = Ending(0, 0, None)
        for number, stage in enumerate(stages):
            if _has_ended(stage):
                logger.info("stage %s has all its steps%s", stage.name, _other_options(stage))
                continue
            _check_before(stage)
            if stage.name is not None:
                logger.info("stage %s, %d of %d", stage.name, number + 1, len(stages))
            ending = train(stage.config, request, run=run, has_next_stage=number + 1 < len(stages))
            if ending.divergence is not None:
                said = _say_diverged(stage, ending, ending.divergence)
                report_to_torchrun(said)  # whichever process is the first to end
                if dist.get_rank() == 0:
                    logger.error("%s", said)
            if ending.status:
                break
            gc.collect()  # the model and the optimizer of the stage are in reference cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        if dist.is_initialized():
            if run is not None and dist.get_rank() == 0:
                ending.mark(run)
            dist.barrier()  # no process exits before the marker file exists
            dist.destroy_process_group()
    return ending.status


def _check_all(stages: Sequence[Stage]) -> None:
    """Check all stages before the first one starts, to avoid failing in a later stage."""
    for stage in stages if len(stages) > 1 else ():  # a single stage is checked by `train` immediately
        find_checkpoint(stage.config)
    for stage, following in itertools.pairwise(stages):
        steps, begun = _steps(stage.config), _steps(following.config)
        if following.before is stage and begun and not _has_all_steps(stage.config, steps):
            raise UserError(
                f"stage: {following.name} has begun and has {begun} steps, but {stage.name} before it has {steps} of "
                f"its {stage.config.training.train_iters} in {stage.config.checkpoint.save}; restore that, or go on "
                f"with --stage {following.name} alone"
            )
    for stage in stages:
        _check_samples(stage)
    for stage in stages[1:]:
        if _has_ended(stage):
            continue
        if stage.before is not None:  # its weights do not exist yet, but their shapes are known
            before = stage.before.config
            model = replace(before.model, vocab_size=vocabulary(before))
            coming = Pretrained(Path(before.checkpoint.save or ""), model)
            coming.check_shapes(stage.config.model, vocabulary(stage.config))
        open_inputs(stage.config, pretrained=stage.before is None)


def _check_samples(stage: Stage) -> None:
    """Check that no rows are repeated or skipped after a stage that used another batch size."""
    if stage.before is None or "samples" not in stage.keep or _steps(stage.config):
        return
    before = stage.before.config
    if before.checkpoint.load is None or (checkpoint := find_checkpoint(before)) is None:
        return
    end, first = end_of_samples(before, checkpoint), stage.config.data.first_sample
    if end != first:
        raise UserError(
            f"stages: {stage.name}: keep: got samples, but {stage.before.name} takes those up to {end:,} and not up to "
            f"{first:,}, as its batches were not all of today's size; leave samples out and give first_sample {end}"
        )


def _say_diverged(stage: Stage, ending: Ending, divergence: DivergedError) -> str:
    """Log the value that was not finite, and the flags with which the run continues from before it.

    The checkpoint of a step is written before its validation: if that diverged, the same checkpoint would diverge
    again.
    """
    saved, validation = ending.checkpoint, divergence.what == VALIDATION_LOSS
    good = next(older(saved), None) if saved is not None and validation else None
    source = saved if not validation else good.folder if good is not None else None
    flags, first = [], ""
    if stage.name is not None:
        flags.append(f"--stage {stage.name}")
        if validation and saved is not None:  # --load names the run, and uses its newest checkpoint
            first = f"remove {saved if good is not None else saved.parent} and "
    if source is not None:
        load = as_flag("load", source if stage.name is None else stage.run)
        flags.append(f"{load}{' --load-latest-complete' if first else ''} --override lr clip_grad")
    elif saved is not None and stage.name is None:
        flags.append("another --save")
    again = f"{first}start again with {' '.join([*flags, 'and '] if flags else [])}a lower --lr or --clip-grad"
    if validation and not ending.step:
        again = "look at the weights that it begins with, and at the rows of validation"
    elif source is not None and not first:
        again += ", or from an earlier checkpoint"
    return (
        f"diverged: the {divergence.what} of step {ending.step} is {divergence.value}, needs {divergence.needs}; "
        f"{'there is no checkpoint' if saved is None else f'the newest checkpoint is {saved}'}; {again}"
    )


def _has_ended(stage: Stage) -> bool:
    """Return whether a stage has completed all its steps, and the validation after them."""
    training, save = stage.config.training, stage.config.checkpoint.save
    steps = _steps(stage.config)
    if stage.name is None or not _has_all_steps(stage.config, steps):
        return False
    if not training.eval_interval or save is None or stage.config.checkpoint.load != save:
        return True
    # otherwise it was stopped between its last checkpoint and that validation
    return early_stopping(stage.config, Path(save), steps).step == steps


def _has_all_steps(config: Config, steps: int) -> bool:
    """Return whether a number of steps is all of a run, or all until it stopped early."""
    if steps == config.training.train_iters:
        return True
    save = config.checkpoint.save
    return save is not None and early_stopping(config, Path(save), steps).reason is not None


def _other_options(stage: Stage) -> str:
    """Describe how the configuration of a completed stage differs from the one it was trained with."""
    checkpoint = find_checkpoint(stage.config)
    assert checkpoint is not None
    changes = differences(checkpoint.manifest.config, stage.config)
    told = [str(change) for change in changes if change.section not in ("checkpoint", "logging", "parallel")]
    return f"; it was trained with other options: {', '.join(told)}" if told else ""


def _steps(config: Config) -> int:
    """Return the completed steps of the run that this one continues; 0 for a new run."""
    checkpoint = find_checkpoint(config) if config.checkpoint.load is not None else None
    return checkpoint.manifest.step if checkpoint is not None else 0


def _check_before(stage: Stage) -> None:
    """Check that the previous stage, whose weights a stage starts from, has ended.

    A stage that resumes from its own checkpoint does not need them.
    """
    if stage.before is None or _steps(stage.config):
        return
    before = stage.before.config
    saved = before.checkpoint.save
    checkpoint = locate(Path(saved), "give it as --init-from") if saved is not None else None
    steps = checkpoint.manifest.step if checkpoint is not None else 0
    if not _has_all_steps(before, steps):
        raise UserError(
            f"stage: {stage.name} begins with the weights of {stage.before.name}, which has {steps} of its "
            f"{before.training.train_iters} steps in {saved}; run that to its end, or add --init-from"
        )
