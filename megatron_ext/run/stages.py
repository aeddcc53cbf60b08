"""Run the stages of a run, one after another in the same processes."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.checkpoint.folders import end_of_samples, find_checkpoint, locate, older
from megatron_ext.checkpoint.pretrained import Pretrained
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
                logger.info("stage %s has all its steps", stage.name)
                continue
            if stage.name is not None:
                logger.info("stage %s, %d of %d", stage.name, number + 1, len(stages))
            ending = train(stage.config, request, run=run, has_next_stage=number + 1 < len(stages))
            if ending.divergence is not None:
                message = _diverged(stage, ending, ending.divergence)
                report_to_torchrun(message)  # whichever process is the first to end
                if dist.get_rank() == 0:
                    logger.error("%s", message)
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
    for stage in stages:
        if stage.before is not None:
            _check_before(stage, stage.before, will_run=stage.before in stages)
    for stage in stages[1:]:
        if _has_ended(stage):
            continue
        if stage.before is not None:  # its weights do not exist yet, but their shapes are known
            before = stage.before.config
            model = replace(before.model, vocab_size=vocabulary(before))
            coming = Pretrained(Path(before.checkpoint.save or ""), model)
            coming.check_shapes(stage.config.model, vocabulary(stage.config))
        open_inputs(stage.config, pretrained=stage.before is None)


def _check_before(stage: Stage, before: Stage, *, will_run: bool) -> None:
    """Check the stage whose weights `stage` starts from.

    It must have ended, unless this command runs it first (`will_run`); a stage that has steps already does not need its
    weights, but was not trained from those that a run would produce now.
    """
    steps, (done, complete) = _steps(stage.config), _saved_steps(before.config)
    if not complete and (steps > 0) == will_run:
        raise UserError(
            f"stage: {stage.name} has {steps} steps and begins with the weights of {before.name}, which has {done} of "
            f"its {before.config.training.train_iters} steps in {before.config.checkpoint.save}; complete or restore "
            f"{before.name}, or use --stage {stage.name} --init-from FOLDER"
        )
    if steps or "samples" not in stage.keep or before.config.checkpoint.load is None:
        return
    end, first = end_of_samples(before.config, find_checkpoint(before.config)), stage.config.data.first_sample
    if end != first:  # steps had another batch size
        raise UserError(
            f"stages: {stage.name}: keep: got samples, but {before.name} takes those up to {end:,} and not up to "
            f"{first:,}, because its batch size has changed; leave samples out and set first_sample {end}"
        )


def _diverged(stage: Stage, ending: Ending, divergence: DivergedError) -> str:
    """Return the message for a value that was not finite, with the flags that continue from before it.

    The checkpoint of a step is written before its validation: if that diverged, the same checkpoint would diverge
    again.
    """
    saved, good = ending.checkpoint, ending.checkpoint
    at_validation = divergence.what == VALIDATION_LOSS
    if at_validation and saved is not None:
        good = next((checkpoint.folder for checkpoint in older(saved)), None)
    flags = []
    if stage.name is not None:  # --load names the run, and uses the stage's newest checkpoint
        flags += [f"--stage {stage.name}"]
        flags += [as_flag("load", stage.run), "--override lr clip_grad"] if saved is not None else []
        flags += ["--load-latest-complete"] if at_validation else []
    elif good is not None:
        flags += [as_flag("load", good), "--override lr clip_grad"]
    elif saved is not None:
        flags += ["another --save"]
    remedy = f"remove {saved} and " if stage.name is not None and at_validation and saved is not None else ""
    remedy += f"start again with {' '.join([*flags, 'and '] if flags else [])}a lower --lr or --clip-grad"
    if at_validation and not ending.step:
        remedy = "check the initial weights and the validation data"
    return (
        f"diverged: the {divergence.what} of step {ending.step} is {divergence.value}, needs {divergence.needs}; "
        f"{'there is no checkpoint' if saved is None else f'the newest checkpoint is {saved}'}; {remedy}"
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


def _steps(config: Config) -> int:
    """Return the completed steps of the run that this one continues; 0 for a new run."""
    checkpoint = find_checkpoint(config) if config.checkpoint.load is not None else None
    return checkpoint.manifest.step if checkpoint is not None else 0


def _saved_steps(config: Config) -> tuple[int, bool]:
    """Return the steps in a run's folder, and whether they are all of its steps."""
    save = config.checkpoint.save
    checkpoint = locate(Path(save), past_damaged=config.checkpoint.load_latest_complete) if save else None
    steps = checkpoint.manifest.step if checkpoint is not None else 0
    return steps, _has_all_steps(config, steps)
