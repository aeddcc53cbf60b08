"""Weights to begin with: a Hugging Face model folder, or a checkpoint of ours, under any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron_ext.checkpoint.folders import NAME_IT, locate
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, is_hugging_face, read_model_config, trained_length
from megatron_ext.config import ModelConfig
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.state import load_weights, saved_config
from megatron_ext.engine.weights import load_hugging_face
from megatron_ext.errors import UserError
from megatron_ext.rope import settled
from megatron_ext.token_weighting.store import fingerprint

# what continued training may change; all else decides what the weights mean
_FREE = {"model_preset", "rotary_base", "init_method_std", "hidden_dropout", "make_vocab_size_divisible_by"} | {
    field.name for field in fields(ModelConfig) if field.name.startswith("rope_")
}


@dataclass(frozen=True)
class Pretrained:
    """A model that is there already: where its weights are, and its shapes.

    Attributes:
        folder: a Hugging Face model folder, or a checkpoint of ours.
        model: its shapes; `vocab_size` is given.
        length: tokens of the rows that it was trained on; None where its folder does not say.
    """

    folder: Path
    model: ModelConfig
    length: int | None = None

    @classmethod
    def find(cls, path: Path) -> Pretrained:
        """A Hugging Face folder, a run folder (its newest checkpoint) or a checkpoint folder.

        Raises:
            UserError: none of these.
        """
        if is_hugging_face(path):
            return cls(path, read_model_config(path), trained_length(path))
        folder = locate(path, NAME_IT)
        if folder is None:
            raise UserError(
                f"checkpoint: {path} is neither a Hugging Face model folder nor holds a checkpoint; check the path"
            )
        saved = saved_config(folder)
        try:
            model = ModelConfig(**saved["model"])
        except (TypeError, KeyError) as error:  # of another version
            raise UserError(f"checkpoint: {folder} cannot be read ({error!r}); give another checkpoint") from None
        if model.vocab_size is None:
            model = replace(model, vocab_size=Tokenizer(saved["data"]["tokenizer_model"]).vocab_size)
        return cls(folder, model, saved["data"]["seq_length"])

    def at(self, length: int) -> ModelConfig:
        """As it computes on `length` tokens: dynamic angles follow the length in transformers, here the rows'."""
        return settled(self.model, length if is_hugging_face(self.folder) else self.length or length)

    def load(self, chunks: Sequence[PackedGPT], ranks: Ranks) -> None:
        """Read the weights into model chunks."""
        assert self.model.vocab_size is not None
        if is_hugging_face(self.folder):
            load_hugging_face(chunks, HuggingFaceTensors(self.folder), self.model, self.model.vocab_size, ranks)
        else:
            load_weights(chunks, self.folder)

    def checkpoint(self) -> Path:
        """Its folder, which also has the optimizer's state.

        Raises:
            UserError: a Hugging Face folder, which has none.
        """
        if is_hugging_face(self.folder):
            raise UserError(
                f"init_optimizer: {self.folder} is a Hugging Face folder, which has no optimizer state; "
                "give a run or a checkpoint, or leave --init-optimizer out"
            )
        return self.folder

    def fingerprint(self) -> str:
        """Of all files that hold weights or shapes."""
        names = ("*.safetensors", "config.json") if is_hugging_face(self.folder) else ("*",)
        return fingerprint(*sorted(file for name in names for file in self.folder.glob(name) if file.is_file()))

    def check_shapes(self, model: ModelConfig, vocab_size: int) -> None:
        """Refuse to begin a model of other shapes with these weights.

        Raises:
            UserError: a field that differs.
        """
        wanted = replace(self.model, kv_channels=self.model.head_size)
        given = replace(model, kv_channels=model.head_size, vocab_size=vocab_size)
        for name, value in vars(wanted).items():
            if name not in _FREE and getattr(given, name) != value:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"{name}: got {getattr(given, name)}, init_from {self.folder} needs {value}; use {flag} {value}"
                )
