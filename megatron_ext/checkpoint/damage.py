"""Check that all processes see the same checkpoint and that it is undamaged.

Each process checks its share of the files.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from megatron_ext.checkpoint.folders import Checkpoint, older, with_offer
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)


def undamaged(checkpoint: Checkpoint, *, content: bool = True, past_damaged: bool = False) -> Checkpoint:
    """Return the checkpoint, or with `past_damaged` and a warning the newest undamaged one up to it. Collective.

    With `content` checksums are compared, not only sizes.

    Raises:
        UserError: it is damaged; the message names the file, and the newest complete checkpoint before it.
        RuntimeError: the processes see different checkpoints.
    """
    earlier = older(checkpoint.folder)
    agree(checkpoint)
    while True:
        manifest = checkpoint.manifest
        share = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        try:
            together(partial(manifest.check_files, checkpoint.folder, share, content=content))
            return checkpoint
        except UserError as error:
            before = next(earlier, None)
            agree(before)
            if before is None or not past_damaged:
                raise with_offer(error, before) from None
            if dist.get_rank() == 0:
                logger.warning("%s\nload_latest_complete: taking %s", error, before.folder)
            checkpoint = before


def agree(checkpoint: Checkpoint | None) -> None:
    """Raise RuntimeError unless all processes have found the same checkpoint, or none. Collective.

    Each process searches by itself, and a shared file system may show an outdated state to some nodes.
    """
    mine = "none"
    if checkpoint is not None:
        mine = f"{checkpoint.folder.name} (sha256 {checkpoint.manifest.digest[:8]})"
    everyone: list[str] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if len(set(everyone)) > 1:
        listed = ", ".join(f"{found} on rank {everyone.index(found)}" for found in dict.fromkeys(everyone))
        raise RuntimeError(
            f"load: got {listed}, needs the same checkpoint for all; a node saw an earlier state of the file "
            "system, or another job writes there: start again"
        )


def together(action: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run an action on each process; if it fails on one, all raise an error, so that none waits. Collective.

    `group` is another group of all processes, for a thread.

    Raises:
        UserError: that of the first process with one; the same on all.
        RuntimeError: another process had another error, which it raises itself.
    """
    mine: BaseException | None = None
    try:
        action()
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt: the other ranks must not continue
        mine = error
    everyone: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine and (isinstance(mine, UserError), str(mine)), group)
    if mine is not None and not isinstance(mine, UserError):
        raise mine
    failures = [one for one in everyone if one is not None]
    for is_user_error, text in sorted(failures, reverse=True, key=lambda failure: failure[0]):
        raise UserError(text) if is_user_error else RuntimeError(f"another process has failed: {text}")
