"""Find, publish and delete a run's checkpoint folders.

    RUN/checkpoints/iter_0000040/                        complete: renamed to this last
    RUN/checkpoints/iter_0000050.<random>.incomplete/    being written, or left by a killed run
    RUN/checkpoints/iter_0000060.<random>.left/          complete, but later than the step that the run was resumed from
    RUN/checkpoints/latest_checkpointed_iteration.txt    the step of the newest complete one

This module needs neither torch nor Megatron.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.history import read_history
from megatron_ext.checkpoint.manifest import MANIFEST, Manifest
from megatron_ext.cli import program
from megatron_ext.config import CheckpointConfig, Config
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write, sync

logger = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
UNFINISHED = ".incomplete"
LEFT = ".left"
_MEGATRON_LM = ("common.pt", ".metadata", "mp_rank_*")  # files of a checkpoint in its formats
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, RUN/checkpoints/iter_0000040 or another name, and its manifest, which is read once."""

    folder: Path
    manifest: Manifest

    @property
    def run(self) -> Path:
        """The run folder that contains it."""
        return self.folder.parent.parent


def folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint after `step` steps."""
    return f"iter_{step:07d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name; None for any other name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return None
    return int(match.group(1))


def saved_steps(run: Path) -> list[int]:
    """Return the steps of all folders with the name of a complete checkpoint, ascending; without checking contents."""
    steps = map(step_of, (run / "checkpoints").glob("iter_*"))
    return sorted(step for step in steps if step is not None)


def locate(path: Path, *, past_damaged: bool = False) -> Checkpoint | None:
    """Find the checkpoint that an option such as `--load` names; None if the folder has none.

    `path` is a checkpoint folder, or a run folder, whose newest checkpoint is named by the pointer; without a pointer
    (the run was killed before the first one was written), the highest step is the newest. Only the manifest is checked.

    With `past_damaged` the checkpoint before a damaged one is taken, with a warning.

    Raises:
        UserError: the folder is one of Megatron-LM, the pointer holds no step, or the manifest is damaged or missing;
            the message names the file, and in the last case the newest complete checkpoint before it.
    """
    folder = path
    if not path.is_dir() or (step_of(path) is None and not (path / MANIFEST).is_file()):
        newest = max(saved_steps(path), default=None)
        pointer = path / "checkpoints" / POINTER
        if pointer.is_file():
            text = pointer.read_bytes().decode(errors="replace").strip()
            if not re.fullmatch(r"[0-9]{1,18}", text):
                raise UserError(
                    f"load: {pointer} holds {text[:40]!r}, needs the number of a step; delete it to take the newest "
                    "checkpoint"
                )
            newest = int(text)
        if newest is None:
            _refuse_megatron_lm(path)
            return None
        folder = path / "checkpoints" / folder_name(newest)
    elif not (path / MANIFEST).is_file():
        _refuse_megatron_lm(path)
    try:
        return read_checkpoint(folder)
    except UserError as error:
        complete = next(older(folder), None)
        if complete is None or not past_damaged:
            raise with_offer(error, complete) from None
        logger.warning("%s\nload_latest_complete: taking %s", error, complete.folder)
        return complete


def _refuse_megatron_lm(path: Path) -> None:
    """Raise UserError if a folder without a checkpoint of ours has one of Megatron-LM."""
    patterns = [folder + name for folder in ("", "iter_*/", "release/") for name in _MEGATRON_LM]
    if any(file for pattern in patterns for file in path.glob(pattern)):
        remedy = f"{program('convert')} megatron-lm-to-megatron --input {path} --output RUN, then --init-from RUN"
        raise UserError(f"load: {path} is a checkpoint of Megatron-LM; convert it: {remedy}")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder's manifest; the other files are not checked.

    Raises:
        UserError: the manifest is damaged or missing, or the folder is named after another step.
    """
    manifest = Manifest.read(folder)
    if step_of(folder) not in (None, manifest.step):
        raise UserError(f"load: {folder} holds the checkpoint of step {manifest.step}; give it that name")
    return Checkpoint(folder, manifest)


def older(folder: Path) -> Iterator[Checkpoint]:
    """Yield the earlier checkpoints that look complete, newest first; none if the folder's name has no step.

    Sizes are checked too, so that no damaged checkpoint is offered as a replacement.
    """
    step = step_of(folder)
    run = folder.parent.parent
    for other in reversed(saved_steps(run)):
        if step is None or other >= step:
            continue
        try:
            checkpoint = read_checkpoint(run / "checkpoints" / folder_name(other))
            checkpoint.manifest.check_files(checkpoint.folder, checkpoint.manifest.files, content=False)
        except UserError:
            continue
        yield checkpoint


def with_offer(error: UserError, complete: Checkpoint | None) -> UserError:
    """Return the error of a damaged checkpoint, extended by the complete one before it, if any."""
    if complete is None:
        return error
    return UserError(f"{error}; {complete.folder} is complete: name that folder instead")


def begin(run: Path, step: int) -> Path:
    """Create the folder that a checkpoint is written into; delete what killed runs were writing or deleting.

    RUN/checkpoints must exist: a run folder that is gone is not made anew.
    """
    checkpoints = run / "checkpoints"
    for unfinished in checkpoints.glob(f"iter_*{UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    aside = checkpoints / f"{folder_name(step)}.{secrets.token_hex(4)}{UNFINISHED}"
    aside.mkdir()
    return aside


def publish(aside: Path) -> Path:
    """Rename the folder of `begin`, whose files are on disk, then update the pointer; all is on disk on return."""
    sync([aside])
    folder = aside.rename(aside.with_name(aside.name.split(".")[0]))
    point(folder)
    return folder


def point(folder: Path) -> None:
    """Set the pointer to a checkpoint folder."""
    sync([folder.parent])  # the folder's name must be on disk before the pointer that names it
    with atomic_write(folder.parent / POINTER) as aside:
        aside.write_text(str(step_of(folder)))
    sync([folder.parent])


def rewind(folder: Path) -> list[Path]:
    """Make `folder`, from which the run resumes, its newest checkpoint; rename later ones, and return their new names.

    Renamed checkpoints are ignored by all functions. The pointer is updated first: if the process is killed before the
    renaming is complete, the next start resumes from `folder` again and renames the rest.
    """
    step = step_of(folder)
    assert step is not None
    pointer = folder.parent / POINTER
    if not pointer.is_file() or pointer.read_bytes().strip() != str(step).encode():
        point(folder)
    later = [folder.with_name(folder_name(other)) for other in saved_steps(folder.parent.parent) if other > step]
    return [path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{LEFT}")) for path in later]


def delete_superfluous(run: Path, newest: int, last: int, every: int) -> None:
    """Delete checkpoints up to step `newest`; keep the `last` of them (0: all), and every step that `every` divides.

    Each is renamed first, so that a killed process leaves no partially deleted checkpoint.
    """
    steps = [step for step in saved_steps(run) if step <= newest]
    for step in steps[:-last]:  # none if `last` is 0
        if every and step % every == 0:
            continue
        folder = run / "checkpoints" / folder_name(step)
        going = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.deleted{UNFINISHED}")
        try:
            folder.rename(going)
        except OSError as error:
            logger.warning("%s cannot be deleted (%s); it stays", folder, error.strerror or error)
        else:
            shutil.rmtree(going, ignore_errors=True)


def find_checkpoint(config: Config) -> Checkpoint | None:
    """Find the checkpoint that `--load` names; None to start from scratch.

    With `load_if_present` a command may be given again: it continues `save`, if that has checkpoints of this command.

    Raises:
        UserError: there is none, it is damaged, or `--save` has the checkpoints of another run.
    """
    options = config.checkpoint
    load = options.load
    if _was_begun_by(options):
        load = options.save
    source = None
    if load:
        source = locate(Path(load), past_damaged=options.load_latest_complete)
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
            f"add --load {options.save} to continue that run (of a run in stages its whole folder), or choose another"
        )
    return source


def _was_begun_by(options: CheckpointConfig) -> bool:
    """Return whether `save` goes on from the checkpoint of `load`, by a command that may be given again."""
    if not (options.save and options.load and options.load_if_present):
        return False
    saved = locate(Path(options.save), past_damaged=options.load_latest_complete)
    if saved is None:
        return False
    starts = [saved.manifest.config.get("checkpoint", {}), *read_history(saved.run).starts]
    loaded = [Path(start["load"]).resolve() for start in starts if start.get("load")]
    return Path(options.load).resolve() in loaded


def end_of_samples(config: Config, checkpoint: Checkpoint | None) -> int:
    """Return the end of a run's samples; steps before the checkpoint may have had another batch size."""
    if checkpoint is None:
        return config.samples
    done = checkpoint.manifest
    remaining_steps = config.training.train_iters - done.step
    return config.data.first_sample + done.consumed_samples + remaining_steps * config.data.global_batch_size
