"""Run the stages of a run, one after another in the same processes."""

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.checkpoint.folders import Checkpoint, end_of_samples, find_checkpoint, locate
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.config.arguments import as_flag
from megatron_ext.config.stages import Stage
from megatron_ext.engine import agreement, parallel
from megatron_ext.engine.platform import choose as choose_platform
from megatron_ext.errors import DivergedError, UserError
from megatron_ext.files.lock import lock
from megatron_ext.launch import report_to_torchrun
from megatron_ext.monitoring.views import check_views
from megatron_ext.run.identity import checked_vocab_size
from megatron_ext.run.inputs import open_inputs
from megatron_ext.run.lm_eval import load_tasks
from megatron_ext.run.signals import Ending, StopRequest, unmark
from megatron_ext.run.trainer import train
from megatron_ext.run.validation import read_losses, read_scored, read_validated, stop_reason

logger = logging.getLogger(__name__)


def train_stages(stages: Sequence[Stage]) -> int:
    """Train each stage that has steps left, starting with the first; a signal ends all of them.

    Returns:
        The exit status described in run/signals.py.

    Raises:
        UserError: any error of `train`, a view that is not installed, a folder that cannot be written or that another
            trainer uses, or a previous stage that has not ended.
    """
    run = stages[0].run
    options = stages[0].config.parallel
    with StopRequest(run) as request:
        _check_all(stages)
        parallel.join(options, choose_platform(options.device))
        for stage in stages:
            agreement.run_on_rank0(partial(check_views, stage.config.logging), Path())
        locks = []  # held until this function ends

        def claim(run: Path) -> None:
            for folder in dict.fromkeys([run, *(Path(stage.config.checkpoint.save or run) for stage in stages)]):
                folder.mkdir(parents=True, exist_ok=True)
                locks.append(lock(folder, "save"))
            unmark(run)

        if run is not None:
            agreement.run_on_rank0(partial(claim, run), run)
        _load_tasks(stages)
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
        if run is not None and dist.get_rank() == 0:
            ending.mark(run)
        dist.barrier()  # no process exits before the marker file exists
        dist.destroy_process_group()
    return ending.status


def _check_all(stages: Sequence[Stage]) -> None:
    """Check all stages before the first one starts, to avoid failing in a later stage."""
    for number, stage in enumerate(stages):
        if stage.before is None:
            find_checkpoint(stage.config)
        else:
            _check_before(stage, stage.before, will_run=stage.before in stages)
        if number == 0 or _has_ended(stage):
            continue
        if stage.before is not None:  # its weights do not exist yet, but their shapes are known
            before = stage.before.config
            model = replace(before.model, vocab_size=checked_vocab_size(before))
            weights = Pretrained(Path(before.checkpoint.save or ""), model)
            weights.check_shapes(stage.config.model, checked_vocab_size(stage.config))
        open_inputs(stage.config, pretrained=stage.before is None)


def _load_tasks(stages: Sequence[Stage]) -> None:
    """Load the tasks of lm-eval on process 0 before the first stage starts, however long it takes. Collective.

    Raises:
        UserError: a task cannot be loaded.
    """
    configs = [stage.config for stage in stages if stage.config.training.lm_eval_interval and not _has_ended(stage)]

    def load() -> None:
        if dist.get_rank() == 0:
            for config in configs:
                load_tasks(config)

    if configs:
        agreement.together_in_threads("lm-eval loader", load)


def _check_before(stage: Stage, before: Stage, *, will_run: bool) -> None:
    """Check the stage whose weights `stage` starts from.

    It must have ended, unless this command runs it first (`will_run`). A stage that has steps already does not need
    these weights, but was not trained from the ones that a run would produce now.
    """
    steps = _steps(stage.config)
    options = before.config.checkpoint
    saved = None
    if options.save:
        saved = locate(Path(options.save), past_damaged=options.load_latest_complete)
    done = _step_of(saved)
    if not _has_all_steps(before.config, done) and (steps > 0) == will_run:
        raise UserError(
            f"stage: {stage.name} has {steps} steps and begins with the weights of {before.name}, which has {done} of "
            f"its {before.config.training.train_iters} steps in {options.save}; complete or restore "
            f"{before.name}, or use --stage {stage.name} --init-from FOLDER"
        )
    end = end_of_samples(before.config, saved)
    first = stage.config.data.first_sample
    if not steps and "samples" in stage.keep and end != first:  # steps had another batch size
        raise UserError(
            f"stages: {stage.name}: keep: got samples, but {before.name} takes those up to {end:,} and not up to "
            f"{first:,}, because its batch size has changed; leave samples out and set first_sample {end}"
        )


def _diverged(stage: Stage, ending: Ending, divergence: DivergedError) -> str:
    """Return the message for a diverged run, with the flags that continue from the last good checkpoint."""
    good = ending.checkpoint
    flags = ""
    spoilt = ""
    if ending.spoilt is not None:
        spoilt = f", {ending.spoilt} has the weights that diverged"
    if good is not None:
        source = as_flag("load", good)
        if stage.name is not None:
            source = f"--stage {stage.name} {as_flag('load', stage.run)}"
            if ending.spoilt is not None:  # a stage continues from its newest checkpoint
                source += " --load-latest-complete"
                spoilt += " (move it away)"
        flags = f"{source} --override lr clip_grad and "
    return (
        f"diverged: the {divergence.what} of step {ending.step} is {divergence.value}, needs {divergence.needs}; the "
        f"last good checkpoint is {good or 'none'}{spoilt}; start again with {flags}a lower --lr or --clip-grad"
    )


def _has_ended(stage: Stage) -> bool:
    """Return whether a stage has completed all its steps, and the evaluations after them."""
    if stage.name is None:
        return False
    steps = _steps(stage.config)
    # it may have been stopped between its last checkpoint and these
    training = stage.config.training
    save = stage.config.checkpoint.save
    if training.eval_interval and steps not in read_validated(save, steps):
        return False
    if training.lm_eval_interval and steps not in read_scored(save, steps):
        return False
    return _has_all_steps(stage.config, steps)


def _has_all_steps(config: Config, steps: int) -> bool:
    """Return whether a run has no step left after `steps`: it has done all, or has stopped early."""
    losses = read_losses(config.checkpoint.save, steps)
    return steps == config.training.train_iters or stop_reason(losses, config.training) is not None


def _steps(config: Config) -> int:
    """Return the completed steps of the run that this one continues; 0 for a new run."""
    return _step_of(find_checkpoint(config))


def _step_of(checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        return 0
    return checkpoint.manifest.step
