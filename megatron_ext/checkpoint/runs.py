"""A run's checkpoint as plain values: where it is, and the configuration that wrote it; without Megatron."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.folders import NAME_IT, locate
from megatron_ext.checkpoint.manifest import Manifest
from megatron_ext.config import Config, ModelConfig
from megatron_ext.config.arguments import Values, from_dict
from megatron_ext.config.vocabulary import vocabulary_size
from megatron_ext.errors import UserError


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint folder and its configuration; `model.vocab_size` is given."""

    folder: Path
    config: Config

    @property
    def model(self) -> ModelConfig:
        """The shapes."""
        return self.config.model


def checkpoint_in(path: Path) -> Path:
    """A checkpoint folder itself, or the newest of a run folder.

    Raises:
        UserError: neither of them, or it is damaged.
    """
    folder = locate(path, NAME_IT)
    if folder is None:
        raise UserError(f"checkpoint: {path} is neither a checkpoint nor a run folder with one; check the path")
    return folder


def read_run(folder: Path) -> SavedRun:
    """The configuration of a checkpoint.

    Raises:
        UserError: a damaged checkpoint, or one of a version with other options.
    """
    values: Values = Manifest.read(folder).config
    unknown = sorted(set(values.get("model", {})) - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise UserError(
            f"checkpoint: {folder} has a model with {unknown[0]}, which this version does not know; use its own"
        )
    try:
        config = from_dict(values)
    except UserError as error:
        raise UserError(f"checkpoint: {folder} has a configuration that cannot be read: {error}") from None
    if config.model.vocab_size is None:
        vocab_size = vocabulary_size(None, config.data.tokenizer_model)
        config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    return SavedRun(folder, config)


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint that a run begins from: what `--load` names, None for a start from scratch.

    Raises:
        UserError: there is none, it is damaged, or `--save` would write among the checkpoints of another run.
    """
    options = config.checkpoint
    found = folders.find(Path(options.load), options.load_latest_complete) if options.load else None
    if options.load and found is None and not options.load_if_present:
        raise UserError(
            f"load: got {options.load}, which holds no checkpoint; "
            "check the folder, or add --load-if-present to start from scratch"
        )
    same = options.save and found and folders.run_of(found).resolve() == Path(options.save).resolve()
    if same and found and folders.step_of(found) is None:
        name = folders.folder_name(folders.saved_step(found))
        raise UserError(
            f"load: got {found}, which --save would continue under another name; rename it to {name}, or choose "
            "another --save"
        )
    if options.save and not same and folders.saved_steps(Path(options.save)):
        raise UserError(
            f"save: got {options.save}, which holds the checkpoints of another run, needs a folder without; "
            f"add --load {options.save} to continue that run, or choose another folder"
        )
    return found
