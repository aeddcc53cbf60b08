"""Find out whether a checkpoint still is what was written: all processes look, each at its share of the files."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import torch.distributed as dist

from megatron_ext.checkpoint.folders import ADD_FLAG, Checkpoint, older, with_offer
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)


def undamaged(
    checkpoint: Checkpoint, remedy: str = ADD_FLAG, *, content: bool = True, past_damaged: bool = False
) -> Checkpoint:
    """Return the checkpoint, or with `past_damaged` the newest one before it that is whole; all processes call it.

    Args:
        checkpoint: its manifest has been read, its files have not.
        remedy: how this user takes the checkpoint before a damaged one.
        content: compare checksums, not sizes alone.
        past_damaged: go back, checkpoint by checkpoint, and say so.

    Raises:
        UserError: it is damaged; the file at fault is named, and the newest complete checkpoint before it offered.
    """
    earlier: Iterator[Checkpoint] = older(checkpoint.folder) if past_damaged else iter(())
    error: str | None = None
    for choice in itertools.chain([checkpoint], earlier):
        if error is not None and dist.get_rank() == 0:
            logger.warning("%s\nload_latest_complete: taking %s", error, choice.folder)
        error = _damage(choice, content)
        if error is None:
            return choice
    raise with_offer(UserError(error), choice.folder, remedy)


def _damage(checkpoint: Checkpoint, content: bool) -> str | None:
    """Say what is wrong with a checkpoint, the same on every process; None if nothing is."""
    mine, folder, manifest = None, checkpoint.folder, checkpoint.manifest
    share = manifest.share(dist.get_rank(), dist.get_world_size())
    try:
        manifest.check_sizes(folder, share)
        if content:
            manifest.check_content(folder, share)
    except UserError as error:
        mine = str(error)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((text for text in everyone if text is not None), None)
