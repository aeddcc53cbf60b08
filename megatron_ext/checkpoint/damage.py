"""Whether a checkpoint still is what was written: all processes look, each at its share of the files."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_ext.checkpoint.manifest import Manifest
from megatron_ext.errors import UserError


def damage(folder: Path, content: bool = True) -> str | None:
    """What is wrong with a checkpoint, None if nothing is; all processes call it and look at their share.

    Args:
        content: compare checksums, not sizes alone.
    """
    mine = None
    try:
        manifest = Manifest.read(folder)
        share = manifest.share(dist.get_rank(), dist.get_world_size())
        manifest.check_sizes(folder, share)
        if content:
            manifest.check_content(folder, share)
    except UserError as error:
        mine = str(error)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((text for text in everyone if text is not None), None)
