"""Parse a run in stages: each starts from the weights of the previous one, with its own configuration and folder.

    stages:
      - {name: 64k, data: {seq_length: 65536}, training: {train_iters: 5000}}
      - {name: 512k, keep: [optimizer], data: {seq_length: 524288}, training: {train_iters: 2500}}

Options above `stages:` apply to all stages. Steps, window, learning rate and rows start anew in each stage, except for
what it keeps:

    optimizer       the moments of Adam
    learning_rate   the schedule continues where the previous stage ended (`lr_first_step`)
    samples         the rows continue where the previous stage ended (`first_sample`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.config import Config
from megatron_ext.errors import UserError

KEEPABLE = ("optimizer", "learning_rate", "samples")
_NAME = re.compile(r"[\w.-]*\w[\w.-]*")


@dataclass(frozen=True)
class Stage:
    """A stage of a run.

    Attributes:
        name: None for a run without stages.
        config: the whole configuration of this stage; `save` and `load` are its own folders.
        before: the stage that it takes its weights from; None if it does not.
        keep: what continues from the previous stage, of `KEEPABLE`.
    """

    name: str | None
    config: Config
    before: Stage | None = None
    keep: tuple[str, ...] = ()

    @property
    def run(self) -> Path | None:
        """The folder of the whole run, given by --save and --load, which contains those of the stages."""
        save = self.config.checkpoint.save
        if save is None:
            return None
        return Path(save) if self.name is None else Path(save).parent


@dataclass(frozen=True)
class StageEntry:
    """A stage as written in the file.

    Attributes:
        name: its name, also that of its folder.
        keep: what continues from the previous stage, of `KEEPABLE`.
        sections: options of this stage alone, by section.
    """

    name: str
    keep: tuple[str, ...]
    sections: dict[str, Any]


def read_entries(entries: Any, path: str) -> list[StageEntry]:
    """Parse the `stages:` of a configuration file; their sections are not checked yet.

    Raises:
        UserError: not a list of mappings, a name that is missing, repeated or unsuitable for a folder, or an unknown
            value of `keep`.
    """
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: stages: got {entries!r}, needs a list of mappings with `name` and sections")
    stages: list[StageEntry] = []
    for number, entry in enumerate(entries):
        sections = dict(entry)
        given, keep = sections.pop("name", ""), sections.pop("keep", [])
        name = str(given)
        if (
            not isinstance(given, str | int)
            or isinstance(given, bool)
            or not _NAME.fullmatch(name)
            or name in (stage.name for stage in stages)
        ):
            raise UserError(
                f"{path}: stages: stage {number} has the name {given!r}, needs one of its own, of letters, digits, _.-"
            )
        if not isinstance(keep, list) or not all(thing in KEEPABLE for thing in keep):
            raise UserError(f"{path}: stages: {name}: keep: got {keep!r}, needs a list of {', '.join(KEEPABLE)}")
        if keep and not number:
            raise UserError(f"{path}: stages: {name}: keep: got {keep!r}, but no stage comes before; leave it out")
        stages.append(StageEntry(name, tuple(keep), sections))
    return stages


def link_stage(name: str, config: Config, keep: Sequence[str], before: Stage | None) -> Stage:
    """Build a stage with its own folders and with what it takes from the previous stage.

    Args:
        name: its name.
        config: as written: `save` and `load` are the run's folders, `init_from` is set if the stage gives it.
        keep: what continues from the previous stage, of `KEEPABLE`.
        before: the previous stage.

    Raises:
        UserError: folders that a run in stages cannot have.
    """
    checkpoint = config.checkpoint
    if checkpoint.load is not None and Path(checkpoint.load) != Path(checkpoint.save or ""):
        raise UserError(
            f"load: got {checkpoint.load}, needs the same as save {checkpoint.save}: "
            "a run in stages continues in its own folder"
        )
    source = before if checkpoint.init_from is None else None
    if source is not None:
        checkpoint = replace(checkpoint, init_from=source.config.checkpoint.save)
    if "optimizer" in keep and checkpoint.init_from is not None:
        checkpoint = replace(checkpoint, init_optimizer=True)
    own: dict[str, Any] = {
        field: str(Path(folder) / name)
        for field in ("save", "load", "dump_trajectory")
        if (folder := getattr(checkpoint, field)) is not None
    }
    later = before is not None and checkpoint.load is not None  # its folder may not have a checkpoint yet
    checkpoint = replace(checkpoint, **own, load_if_present=checkpoint.load_if_present or later)
    config = replace(config, checkpoint=checkpoint)
    if before is not None:
        _check_kept(name, config, keep, before)
    if before is not None and "learning_rate" in keep:
        first = before.config.optimizer.lr_first_step + before.config.training.train_iters
        config = replace(config, optimizer=replace(config.optimizer, lr_first_step=first))
    if before is not None and "samples" in keep:
        config = replace(config, data=replace(config.data, first_sample=before.config.samples))
    return Stage(name, config, source, tuple(keep))


def _check_kept(name: str, config: Config, keep: Sequence[str], before: Stage) -> None:
    """Raise UserError if the stage cannot continue what it keeps from the previous one."""
    optimizer, earlier = config.optimizer, before.config.optimizer
    where = f"stages: {name}: keep"
    falls = "constant" not in (optimizer.lr_decay_style, earlier.lr_decay_style)
    if "learning_rate" in keep and falls and earlier.lr_decay_iters is None:
        raise UserError(
            f"{where}: got learning_rate, but that of {before.name} has fallen to min_lr at its own end; "
            "give lr_decay_iters, the steps of both together, for all stages"
        )
    counted = [thing for thing in keep if thing in ("learning_rate", "samples")]
    if counted and before.config.training.early_stopping_patience:
        raise UserError(
            f"{where}: got {', '.join(counted)}, which go on after all steps of {before.name}, but that may stop "
            f"early; leave {' and '.join(counted)} out, or give {before.name} early_stopping_patience 0"
        )
    if "samples" in keep:
        for field in (
            "data_path",
            "mixture",
            "packing",
            "packing_options",
            "long_share",
            "split",
            "seq_length",
            "seed",
        ):
            now, then = ((each.training if field == "seed" else each.data) for each in (config, before.config))
            if getattr(now, field) != getattr(then, field):
                raise UserError(
                    f"{where}: got samples, but {field} is another than that of {before.name}, and so are the rows; "
                    "leave samples out"
                )
