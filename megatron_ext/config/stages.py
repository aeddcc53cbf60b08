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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from megatron_ext.config import Config
from megatron_ext.errors import UserError
from megatron_ext.files.reading import typed

# with the seed, what determines the rows
_ROWS = ("data_path", "mixture", "packing", "packing_options", "long_share", "split", "seq_length")


@dataclass(frozen=True)
class Stage:
    """A stage of a run."""

    name: str | None  # None for a run without stages
    config: Config  # the whole configuration of this stage; `save` and `load` are its own folders
    before: "Stage | None" = None  # the stage that it takes its weights from; None if it does not
    keep: tuple[str, ...] = ()  # what continues from the previous stage

    @property
    def run(self) -> Path | None:
        """The folder of the whole run, given by --save and --load, which contains the folders of its stages."""
        save = self.config.checkpoint.save
        if save is None:
            return None
        if self.name is None:
            return Path(save)
        return Path(save).parent


class StageEntry(BaseModel, extra="allow", coerce_numbers_to_str=True):
    """A stage as written in the file: its name, what it keeps, and sections, which are not checked yet."""

    name: Annotated[str, Field(pattern=r"^[\w.-]*\w[\w.-]*$")]
    keep: tuple[Literal["optimizer", "learning_rate", "samples"], ...] = ()

    @property
    def sections(self) -> dict[str, Any]:
        return self.model_extra or {}


def read_entries(entries: Any, path: str) -> list[StageEntry]:
    """Parse the `stages:` of a configuration file; their names must differ."""
    stages = typed(entries, list[StageEntry], path, "stages")
    names = [stage.name for stage in stages]
    if not names or len(set(names)) < len(names):
        raise UserError(f"{path}: stages: got {', '.join(names) or 'none'}, needs at least one, each with its own name")
    return stages


def link_stage(name: str, config: Config, keep: Sequence[str], before: Stage | None) -> Stage:
    """Build a stage with its own folders and with what it takes from the previous stage, `before`.

    In `config`, as written, `save` and `load` are the run's folders, and `init_from` is set if the stage gives it.
    Raises UserError for folders that a run in stages cannot have, and for what it cannot keep.
    """
    if keep and before is None:
        raise UserError(f"stages: {name}: keep: got {', '.join(keep)}, needs a previous stage")
    checkpoint = config.checkpoint
    if checkpoint.load is not None and Path(checkpoint.load) != Path(checkpoint.save or ""):
        raise UserError(f"load: got {checkpoint.load}, a run in stages needs the same folder as save {checkpoint.save}")
    source = before if checkpoint.init_from is None else None
    if source is not None:
        checkpoint = replace(checkpoint, init_from=source.config.checkpoint.save)
    if "optimizer" in keep and checkpoint.init_from is not None:
        checkpoint = replace(checkpoint, init_optimizer=True)
    if before is not None and checkpoint.load is not None:  # its folder may not have a checkpoint yet
        checkpoint = replace(checkpoint, load_if_present=True)
    folders: dict[str, Any] = {}
    for field in ("save", "load", "dump_trajectory"):
        folder = getattr(checkpoint, field)
        if folder is not None:
            folders[field] = str(Path(folder) / name)
    config = replace(config, checkpoint=replace(checkpoint, **folders))
    if before is not None:
        _check_kept(name, config, keep, before)
        if "learning_rate" in keep:
            first = before.config.optimizer.lr_first_step + before.config.training.train_iters
            config = replace(config, optimizer=replace(config.optimizer, lr_first_step=first))
        if "samples" in keep:
            config = replace(config, data=replace(config.data, first_sample=before.config.samples))
    return Stage(name, config, source, tuple(keep))


def _check_kept(name: str, config: Config, keep: Sequence[str], before: Stage) -> None:
    """Raise UserError if the stage cannot continue what it keeps from the previous one."""
    counted = [what for what in keep if what != "optimizer"]
    if counted and before.config.training.early_stopping_patience:
        raise UserError(
            f"stages: {name}: keep: got {', '.join(counted)}, which continue after the last step of {before.name}, but "
            f"that may stop early; leave them out, or set early_stopping_patience of {before.name} to 0"
        )
    earlier = before.config
    changed = [field for field in _ROWS if getattr(config.data, field) != getattr(earlier.data, field)]
    if config.training.seed != earlier.training.seed:
        changed.append("seed")
    if "samples" in keep and changed:
        raise UserError(
            f"stages: {name}: keep: got samples, but its {', '.join(changed)} differs from that of {before.name}, so "
            "that its rows are different ones; leave samples out"
        )
