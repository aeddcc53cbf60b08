"""A run's checkpoint folders: which are complete, which is the newest, which may go.

    RUN/checkpoints/iter_0000040/                        complete: renamed to this when it was whole
    RUN/checkpoints/iter_0000050.<random>.incomplete/    being written, or left by a kill
    RUN/checkpoints/iter_0000060.<random>.left/          whole, of a future that the run did not take
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
from megatron_ext.errors import UserError
from megatron_ext.files.aside import file_aside, move_in, sync

logger = logging.getLogger(__name__)

POINTER = "latest_checkpointed_iteration.txt"
UNFINISHED = ".incomplete"
LEFT = ".left"
ADD_FLAG = "add --load-latest-complete to take it"  # where --load named the run
NAME_IT = "name that folder instead"  # everywhere else
_NAME = re.compile(r"iter_(\d{7,})")


def folder_name(step: int) -> str:
    """The folder of the checkpoint after `step` steps."""
    return f"iter_{step:07d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def saved_step(folder: Path) -> int:
    """The completed steps of a checkpoint folder, whatever its name."""
    return Manifest.read(folder).step


def saved_steps(run: Path) -> list[int]:
    """The steps whose folders carry a complete checkpoint's name, rising; their content is not looked at."""
    return sorted(step for folder in (run / "checkpoints").glob("iter_*") if (step := step_of(folder)) is not None)


def latest(run: Path, remedy: str = ADD_FLAG) -> Path | None:
    """The newest complete checkpoint of a run folder, None where there is none.

    It is the one that the pointer names; without a pointer (a kill before the first one was written), the one of
    the highest step. Its manifest and the names of its files are checked, sizes and contents are not.

    Args:
        run: the folder.
        remedy: how the caller's user takes the one before a damaged one.

    Raises:
        UserError: the pointer is unreadable, or its checkpoint is damaged or gone; the one before it is offered.
    """
    pointer = run / "checkpoints" / POINTER
    if not pointer.is_file():
        steps = saved_steps(run)
        return checked(run / "checkpoints" / folder_name(steps[-1]), remedy) if steps else None
    text = pointer.read_bytes().decode(errors="replace").strip()
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"load: {pointer} holds {text[:40]!r}, needs the number of a step{_offer(run, None, remedy)}")
    return checked(run / "checkpoints" / folder_name(int(text)), remedy)


def checked(folder: Path, remedy: str = ADD_FLAG) -> Path:
    """`folder`, if its manifest is whole and every file is there.

    Raises:
        UserError: it is not; the file at fault is named and the newest complete checkpoint before it is offered.
    """
    if not folder.is_dir():
        pointer = folder.parent / POINTER
        raise UserError(
            f"load: {pointer} names step {step_of(folder)}, but {folder} is no checkpoint; name another step"
            + _offer(folder.parent.parent, step_of(folder), remedy)
        )
    try:
        manifest = Manifest.read(folder)
        manifest.check_names(folder)
        if step_of(folder) not in (None, manifest.step):
            raise UserError(f"load: {folder} holds the checkpoint of step {manifest.step}; give it that name")
    except UserError as error:
        raise with_offer(error, folder, remedy) from None
    return folder


def with_offer(error: UserError, folder: Path, remedy: str = ADD_FLAG) -> UserError:
    """The error of a damaged checkpoint, with the newest complete one before it."""
    step = step_of(folder)
    return UserError(str(error) if step is None else f"{error}{_offer(run_of(folder), step, remedy)}")


def before(run: Path, step: int | None) -> Iterator[Path]:
    """Checkpoints older than `step` (None: all) that look complete, from the newest on; sizes are checked."""
    for older in reversed(saved_steps(run)):
        folder = run / "checkpoints" / folder_name(older)
        if (step is None or older < step) and _looks_complete(folder):
            yield folder


def older(folder: Path) -> Iterator[Path]:
    """`before` a checkpoint folder; none where its name says no step."""
    step = step_of(folder)
    return iter(()) if step is None else before(run_of(folder), step)


def locate(path: Path, remedy: str = ADD_FLAG) -> Path | None:
    """What `--load` and its like name: a checkpoint folder itself, or a run folder's newest complete checkpoint.

    Raises:
        UserError: the checkpoint is damaged.
    """
    return checked(path, remedy) if _says_checkpoint(path) else latest(path, remedy)


def locate_complete(path: Path) -> Path | None:
    """As `locate`, but past damaged checkpoints to the newest complete one, saying so."""
    try:
        return locate(path)
    except UserError as error:
        found = next(older(path) if _says_checkpoint(path) else before(path, _pointed(path)), None)
        if found is None:
            raise
        logger.warning("%s\nload_latest_complete: taking %s", error, found)
        return found


def find(path: Path, past_damaged: bool) -> Path | None:
    """`locate_complete` or `locate`."""
    return locate_complete(path) if past_damaged else locate(path)


def run_of(folder: Path) -> Path:
    """The run folder of a checkpoint folder."""
    return folder.parent.parent


def begin(run: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written into; leftovers of killed writers go."""
    checkpoints = run / "checkpoints"
    remove_unfinished(checkpoints)
    aside = checkpoints / f"{folder_name(step)}.{secrets.token_hex(4)}{UNFINISHED}"
    aside.mkdir(parents=True)
    return aside


def publish(aside: Path, unsynced: Sequence[str] = ()) -> Path:
    """Give a whole checkpoint its name, then name it in the pointer. All of it is on disk when this returns.

    Args:
        aside: as `begin` made it.
        unsynced: files that their writers have not forced to disk.

    Raises:
        UserError: it has its name, but the pointer cannot be written.
    """
    folder = aside.with_name(aside.name.split(".")[0])
    sync([*(aside / name for name in unsynced), aside])
    # `folder` exists where a run that began from an earlier checkpoint saves the same step again
    move_in(aside, folder, aside.with_name(f"{folder.name}.{secrets.token_hex(4)}.replaced{UNFINISHED}"))
    step = step_of(folder)
    assert step is not None
    try:
        point(folder.parent, step)
    except OSError as error:
        raise UserError(
            f"save: {folder.parent / POINTER} cannot be written ({error.strerror or error}), but {folder} is complete; "
            f"make room and start again with --load {folder}"
        ) from None
    remove_unfinished(folder.parent)
    return folder


def point(checkpoints: Path, step: int) -> None:
    """Let the pointer name `step`."""
    sync([checkpoints])  # the folder's name reaches the disk before the pointer that names it
    with file_aside(checkpoints / POINTER) as aside:
        aside.write_text(str(step))
    sync([checkpoints])


def rewind(folder: Path) -> list[Path]:
    """The run goes on from `folder`: the pointer names it, and later checkpoints are no longer the run's.

    They keep their content under a name that nothing here counts, offers or deletes.

    Returns:
        where they are now.
    """
    step = step_of(folder)
    assert step is not None
    pointer = folder.parent / POINTER
    if not pointer.is_file() or pointer.read_bytes().strip() != str(step).encode():
        point(folder.parent, step)
    later = [folder.with_name(folder_name(other)) for other in saved_steps(run_of(folder)) if other > step]
    return [one.rename(one.with_name(f"{one.name}.{secrets.token_hex(4)}{LEFT}")) for one in later]


def remove_unfinished(checkpoints: Path) -> None:
    """Delete what was being written, replaced or deleted when a run was killed."""
    for folder in checkpoints.glob(f"iter_*{UNFINISHED}"):
        _remove(folder)


def _remove(folder: Path) -> None:
    """Delete a folder that nothing depends on; where that fails (a reader on NFS, another process), only say so."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:
        logger.warning("%s cannot be deleted (%s); nothing needs it", folder, error.strerror or error)


@dataclass(frozen=True)
class Retention:
    """Which complete checkpoints stay: the newest `last` and those of every `every`-th step; 0: all.

    Attributes:
        last: how many of the newest stay.
        every: steps that this divides stay for ever.
    """

    last: int = 0
    every: int = 0

    def superfluous(self, steps: Sequence[int]) -> list[int]:
        """Of rising `steps`, those that may go; never the newest."""
        if not self.last:
            return []
        return [step for step in steps[: -self.last] if not (self.every and step % self.every == 0)]

    def apply(self, run: Path, newest: int) -> None:
        """Delete what is superfluous up to `newest`, each by a rename first: a kill leaves none of them half there."""
        for step in self.superfluous([step for step in saved_steps(run) if step <= newest]):
            folder = run / "checkpoints" / folder_name(step)
            going = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.deleted{UNFINISHED}")
            try:
                folder.rename(going)
            except OSError as error:
                logger.warning("%s cannot be deleted (%s); it stays", folder, error.strerror or error)
            else:
                _remove(going)


def _pointed(run: Path) -> int | None:
    """The step that a run's pointer names, None where it says nothing readable."""
    try:
        return int((run / "checkpoints" / POINTER).read_bytes())
    except (OSError, ValueError):
        return None


def _offer(run: Path, step: int | None, remedy: str) -> str:
    found = next(before(run, step), None)
    return f"; {found} is complete: {remedy}" if found else ""


def _says_checkpoint(path: Path) -> bool:
    return path.is_dir() and (step_of(path) is not None or (path / MANIFEST).is_file())


def _looks_complete(folder: Path) -> bool:
    try:
        manifest = Manifest.read(folder)
        manifest.check_sizes(folder, manifest.files)
    except UserError:
        return False
    return True
