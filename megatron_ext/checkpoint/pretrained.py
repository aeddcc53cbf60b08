"""Inspect the model in a Hugging Face model folder, a run folder or a checkpoint folder."""

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.checkpoint.folders import Checkpoint, locate
from megatron_ext.checkpoint.hf.config import differences
from megatron_ext.checkpoint.hf.folder import is_hugging_face, read_config, read_model_config
from megatron_ext.config import ModelConfig
from megatron_ext.config.arguments import as_flag, from_dict
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.errors import UserError
from megatron_ext.files.fingerprint import fingerprint
from megatron_ext.rope import settled


@dataclass(frozen=True)
class Pretrained:
    """An existing model: its weights, its shapes, and how it was trained."""

    folder: Path  # a Hugging Face model folder, or a checkpoint folder
    model: ModelConfig  # its shapes, with `vocab_size`, and the rotary base of its last step
    length: int | None = None  # tokens of the rows that it was trained with; None if unknown
    tokenizer: str | None = None  # the tokenizer of a run, as named in its configuration
    checkpoint: Checkpoint | None = None  # the checkpoint in `folder`; None for a Hugging Face folder

    @classmethod
    def find(cls, path: Path) -> "Pretrained":
        """Inspect a Hugging Face folder, a run folder (its newest checkpoint) or a checkpoint folder.

        Raises:
            UserError: the folder is none of these, or is damaged.
        """
        if is_hugging_face(path):
            return cls(path, read_model_config(path), read_config(path).get("max_position_embeddings"))
        return cls.find_checkpoint(path)

    @classmethod
    def find_checkpoint(cls, path: Path) -> "Pretrained":
        """Inspect a run folder (its newest checkpoint) or a checkpoint folder.

        Raises:
            UserError: the folder is neither of these, is damaged, or is from a version with other model options.
        """
        checkpoint = locate(path)
        if checkpoint is None:
            raise UserError(f"checkpoint: {path} holds no checkpoint of this package; check the path")
        folder = checkpoint.folder
        saved = checkpoint.manifest.config
        options = vars(ModelConfig())
        unknown = sorted(name for name, value in saved.get("model", {}).items() if value and name not in options)
        if unknown:
            raise UserError(
                f"checkpoint: {folder} has a model with {unknown[0]}, which this version does not know; use its own"
            )
        try:
            config = from_dict(saved)
        except UserError as error:
            raise UserError(f"checkpoint: {folder} has a configuration that cannot be read: {error}") from None
        model = config.model
        data = config.data
        if model.rope_window_bases:  # the base of the last step, whose window may not have been the final one
            window = config.window_schedule().window_at(max(checkpoint.manifest.step - 1, 0))
            model = replace(model, rotary_base=model.rotary_base_at(window), rope_window_bases=())
        if model.vocab_size is None:
            model = replace(model, vocab_size=vocabulary_size(None, data.tokenizer_model))
        return cls(folder, model, data.seq_length, data.tokenizer_model, checkpoint)

    @property
    def vocab_size(self) -> int:
        """The number of rows of its embedding, without padding."""
        assert self.model.vocab_size is not None
        return self.model.vocab_size

    def at(self, length: int) -> ModelConfig:
        """Return the shapes for computing on `length` tokens.

        Dynamic rotary scaling depends on the length of each text in transformers, of the rows in our runs.
        """
        if self.checkpoint is not None:
            length = self.length or length
        return settled(self.model, length)

    def fingerprint(self) -> str:
        """Return the fingerprint of all files that contain weights or shapes."""
        names = ["*"]
        if self.checkpoint is None:
            names = ["*.safetensors", "config.json"]
        return fingerprint(*sorted(file for name in names for file in self.folder.glob(name) if file.is_file()))

    def check_shapes(self, model: ModelConfig, vocab_size: int) -> None:
        """Check that a model to be initialized with these weights has their shapes.

        Raises:
            UserError: the message names every field that differs, with the flags that would match.
        """
        model = replace(model, vocab_size=vocab_size)
        new = vars(model)
        wanted = vars(self.model)
        unlike = [name for name in differences(model, self.model) if new[name] != wanted[name]]
        if "rotary_base_local" in unlike:  # continued training may change it
            unlike.remove("rotary_base_local")
        if unlike:
            got = ", ".join(f"{name}: got {new[name]}" for name in unlike)
            flags = " ".join(as_flag(name, wanted[name]) for name in unlike)
            raise UserError(f"{got}; init_from {self.folder} needs others; use {flags}")
