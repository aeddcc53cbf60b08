"""Find the checkpoint that a run resumes from, and check that --save does not mix two runs."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.checkpoint.folders import Checkpoint, folder_name, locate, saved_steps, step_of
from megatron_ext.config import Config
from megatron_ext.errors import UserError


def find_checkpoint(config: Config) -> Checkpoint | None:
    """Find the checkpoint that `--load` names; None to start from scratch.

    Raises:
        UserError: there is none, it is damaged, or `--save` has the checkpoints of another run.
    """
    options = config.checkpoint
    source = locate(Path(options.load), past_damaged=options.load_latest_complete) if options.load else None
    if options.load and source is None and not options.load_if_present:
        raise UserError(
            f"load: got {options.load}, which holds no checkpoint; "
            "check the folder, or add --load-if-present to start from scratch"
        )
    if options.save is None:
        return source
    continues = source is not None and source.run.resolve() == Path(options.save).resolve()
    if source is not None and continues and step_of(source.folder) is None:
        raise UserError(
            f"load: got {source.folder}, which --save would continue under another name; rename it to "
            f"{folder_name(source.manifest.step)}, or choose another --save"
        )
    if not continues and saved_steps(Path(options.save)):
        raise UserError(
            f"save: got {options.save}, which holds the checkpoints of another run, needs a folder without; "
            f"add --load {options.save} to continue that run, or choose another folder"
        )
    return source


def end_of_samples(config: Config, checkpoint: Checkpoint | None) -> int:
    """Return the end of a run's samples; steps before the checkpoint may have had another batch size."""
    if checkpoint is None:
        return config.samples
    done = checkpoint.manifest
    left = config.training.train_iters - done.step
    return config.data.first_sample + done.consumed_samples + left * config.data.global_batch_size
