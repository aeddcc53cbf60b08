"""Find, publish and delete a run's checkpoint folders.

    RUN/checkpoints/iter_0000040/                        complete: renamed to this last
    RUN/checkpoints/iter_0000050.<random>.incomplete/    being written, or left by a kill
    RUN/checkpoints/iter_0000060.<random>.left/          complete, but later than the step that the run was resumed from
    RUN/checkpoints/latest_checkpointed_iteration.txt    the step of the newest complete one

Nothing here needs torch or Megatron.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint.manifest import MANIFEST, Manifest
from megatron_ext.errors import REMEDIES, UserError
from megatron_ext.files.atomic import atomic_write, move_in, sync

logger = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
UNFINISHED = ".incomplete"
LEFT = ".left"
ADD_FLAG = "add --load-latest-complete to take it"  # where --load named the run
NAME_IT = "name that folder instead"  # everywhere else
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class Checkpoint:
    """Holds the name of a checkpoint folder and its manifest, which is read once.

    Attributes:
        folder: RUN/checkpoints/iter_0000040, or another name that its user gave it.
        manifest: all that it holds except tensors.
    """

    folder: Path
    manifest: Manifest

    @property
    def run(self) -> Path:
        """The run folder around it."""
        return self.folder.parent.parent


def folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint after `step` steps."""
    return f"iter_{step:07d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def saved_steps(run: Path) -> list[int]:
    """Return the steps whose folders have a complete checkpoint's name, in rising order; contents are not checked."""
    return sorted(step for folder in (run / "checkpoints").glob("iter_*") if (step := step_of(folder)) is not None)


def locate(path: Path, remedy: str = ADD_FLAG, *, past_damaged: bool = False) -> Checkpoint | None:
    """Find the checkpoint that an option such as `--load` names; None if the folder holds none.

    `path` is a checkpoint folder, or a run folder, whose newest checkpoint is the one that the pointer names; without
    a pointer (a kill before the first one was written), the one of the highest step. Its manifest and the names of
    its files are checked, sizes and contents are not.

    Args:
        path: what the user named.
        remedy: what the error tells the user to do to take the checkpoint before a damaged one.
        past_damaged: take that one, with a warning.

    Raises:
        UserError: the pointer is unreadable, or the checkpoint is damaged or gone; the file at fault is named, and
            the newest complete checkpoint before it offered.
    """
    fallback: Iterator[Checkpoint] = iter(())
    try:
        folder = path
        if not path.is_dir() or (step_of(path) is None and not (path / MANIFEST).is_file()):
            fallback = _complete(path, before=None)
            newest = _newest_step(path)
            if newest is None:
                return None
            folder = path / "checkpoints" / folder_name(newest)
        fallback = older(folder)
        if not folder.is_dir():
            pointer = folder.parent / POINTER
            raise UserError(
                f"load: {pointer} names step {step_of(folder)}, but {folder} is no checkpoint; name another step"
            )
        return read_checkpoint(folder)
    except UserError as error:
        complete = next(fallback, None)
        if complete is None:
            raise
        if not past_damaged:
            raise _offering(error, complete, remedy) from None
        logger.warning("%s\nload_latest_complete: taking %s", error, complete.folder)
        return complete


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder's manifest, and look for every file that it lists.

    Raises:
        UserError: the manifest is damaged, a file is missing, or the folder has another step's name.
    """
    manifest = Manifest.read(folder)
    manifest.check_names(folder)
    if step_of(folder) not in (None, manifest.step):
        raise UserError(f"load: {folder} holds the checkpoint of step {manifest.step}; give it that name")
    return Checkpoint(folder, manifest)


def older(folder: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints before a folder's that look complete, newest first; none if its name has no step.

    Sizes are checked as well, so that no damaged checkpoint is offered instead of another one.
    """
    step = step_of(folder)
    return iter(()) if step is None else _complete(folder.parent.parent, before=step)


def with_offer(error: UserError, folder: Path, remedy: str) -> UserError:
    """Return the error of a damaged checkpoint, with the newest complete one before it, if any."""
    complete = next(older(folder), None)
    return error if complete is None else _offering(error, complete, remedy)


def _offering(error: UserError, complete: Checkpoint, remedy: str) -> UserError:
    return UserError(f"{error}; {complete.folder} is complete: {remedy}")


def _complete(run: Path, *, before: int | None) -> Iterator[Checkpoint]:
    for step in reversed(saved_steps(run)):
        if before is None or step < before:
            try:
                checkpoint = read_checkpoint(run / "checkpoints" / folder_name(step))
                checkpoint.manifest.check_sizes(checkpoint.folder, checkpoint.manifest.files)
            except UserError:
                continue
            yield checkpoint


def _newest_step(run: Path) -> int | None:
    pointer = run / "checkpoints" / POINTER
    if not pointer.is_file():
        return max(saved_steps(run), default=None)
    text = pointer.read_bytes().decode(errors="replace").strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UserError(f"load: {pointer} holds {text[:40]!r}, needs the number of a step")
    return int(text)


def begin(run: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written into, and delete unfinished ones."""
    checkpoints = run / "checkpoints"
    remove_unfinished(checkpoints)
    aside = checkpoints / f"{folder_name(step)}.{secrets.token_hex(4)}{UNFINISHED}"
    aside.mkdir(parents=True)
    return aside


def publish(aside: Path) -> Path:
    """Give a complete checkpoint its name, then name it in the pointer. All of it is on disk when this returns.

    Args:
        aside: as `begin` made it; its files are on disk.

    Raises:
        UserError: it has its name, but the pointer cannot be written.
    """
    folder = aside.with_name(aside.name.split(".")[0])
    sync([aside])
    # `folder` exists where a run that began from an earlier checkpoint saves the same step again
    move_in(aside, folder, aside.with_name(f"{folder.name}.{secrets.token_hex(4)}.replaced{UNFINISHED}"))
    step = step_of(folder)
    assert step is not None
    try:
        point(folder.parent, step)
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise UserError(
            f"save: {folder.parent / POINTER} cannot be written ({error.strerror or error}), but {folder} is complete; "
            f"make room and start again with --load {folder}"
        ) from None
    remove_unfinished(folder.parent)
    return folder


def point(checkpoints: Path, step: int) -> None:
    """Make the pointer name `step`."""
    sync([checkpoints])  # the folder's name reaches the disk before the pointer that names it
    with atomic_write(checkpoints / POINTER) as aside:
        aside.write_text(str(step))
    sync([checkpoints])


def rewind(folder: Path) -> list[Path]:
    """Make `folder` the run's newest checkpoint, because the run resumes from it, and rename later ones.

    Nothing here counts, offers or deletes the renamed ones. The pointer is updated first: after a kill in between, the
    next start resumes from `folder` again and renames the rest.

    Returns:
        the new names.
    """
    step = step_of(folder)
    assert step is not None
    pointer = folder.parent / POINTER
    if not pointer.is_file() or pointer.read_bytes().strip() != str(step).encode():
        point(folder.parent, step)
    later = [folder.with_name(folder_name(other)) for other in saved_steps(folder.parent.parent) if other > step]
    return [left.rename(left.with_name(f"{left.name}.{secrets.token_hex(4)}{LEFT}")) for left in later]


def remove_unfinished(checkpoints: Path) -> None:
    """Delete folders that were being written, replaced or deleted when a run was killed."""
    for folder in checkpoints.glob(f"iter_*{UNFINISHED}"):
        _remove(folder)


def _remove(folder: Path) -> None:
    """Delete a folder that nothing depends on; log a warning if that fails (a reader on NFS, another process)."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:
        logger.warning("%s cannot be deleted (%s); nothing needs it", folder, error.strerror or error)


@dataclass(frozen=True)
class Retention:
    """Decides which complete checkpoints are kept.

    Attributes:
        last: how many of the newest are kept; 0: all.
        every: steps that this divides are always kept.
    """

    last: int = 0
    every: int = 0

    def superfluous(self, steps: Sequence[int]) -> list[int]:
        """Return those of the rising `steps` that may be deleted; never the newest."""
        if not self.last:
            return []
        return [step for step in steps[: -self.last] if not (self.every and step % self.every == 0)]

    def apply(self, run: Path, newest: int) -> None:
        """Delete superfluous checkpoints up to `newest`, each renamed first: a kill leaves none half deleted."""
        for step in self.superfluous([step for step in saved_steps(run) if step <= newest]):
            folder = run / "checkpoints" / folder_name(step)
            going = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.deleted{UNFINISHED}")
            try:
                folder.rename(going)
            except OSError as error:
                logger.warning("%s cannot be deleted (%s); it stays", folder, error.strerror or error)
            else:
                _remove(going)
