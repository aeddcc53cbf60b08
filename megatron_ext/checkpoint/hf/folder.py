"""Read a Hugging Face model folder: its configuration and its tensors."""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_ext.checkpoint.hf.config import model_config
from megatron_ext.checkpoint.hf.names import all_names, full_shape
from megatron_ext.checkpoint.hf.stacked import ExpertTensor, expert_tensors, is_stacked
from megatron_ext.checkpoint.manifest import check_inside
from megatron_ext.checkpoint.tensors import DTYPES
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_object

logger = logging.getLogger(__name__)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = {word: dtype for word, dtype in DTYPES.items() if dtype.is_floating_point}


def is_hugging_face(folder: Path) -> bool:
    """Return whether the folder has a Hugging Face model."""
    return (folder / "config.json").is_file()


def read_model_config(folder: Path) -> ModelConfig:
    """Read a model's shapes from its config.json; `vocab_size` is the number of rows of the embedding.

    Raises:
        UserError: the file is missing, or the architecture or an entry is not supported; the message names it.
    """
    entries = read_config(folder)
    try:
        return model_config(entries)
    except UserError as error:
        raise UserError(f"checkpoint: {folder / 'config.json'} {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the entries of config.json; raise UserError if it is missing or damaged."""
    entries = read_object(folder / "config.json", "holds no JSON object; give a Hugging Face model folder")
    if entries is None:
        raise UserError(f"checkpoint: {folder} has no config.json; give a Hugging Face model folder")
    return entries


def trained_length(folder: Path) -> int | None:
    """Return the longest context that a Hugging Face model was trained with, according to its configuration."""
    length = read_config(folder).get("max_position_embeddings")
    return length if type(length) is int and 0 < length <= 2**40 else None


class HuggingFaceTensors:
    """Reads the tensors of a folder's safetensors files, one at a time.

    Attributes:
        folder: the model folder.
        names: of all its tensors, with one of its own for each expert's.

    Raises:
        UserError: there are no safetensors, or the index names a missing file or one outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / INDEX, folder / SINGLE
        if index.is_file():
            damaged = "is damaged, it maps no tensors to files; download it again"
            files: Any = (read_object(index, damaged) or {}).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise UserError(f"{index} {damaged}")
            for file in files.values():
                check_inside(file, index, "checkpoint")
            missing = sorted(file for file in set(files.values()) if not (folder / file).is_file())
            if missing:
                raise UserError(f"checkpoint: {folder} lacks {missing[0]}, which its index names; download it again")
        elif single.is_file():
            with _opened(single) as opened:
                files = dict.fromkeys(opened.keys(), single.name)
        else:
            raise UserError(f"checkpoint: {folder} holds no model.safetensors; convert the model to safetensors first")
        self._files: dict[str, str] = files
        self._experts: dict[str, ExpertTensor] = {}
        for name in filter(is_stacked, files):
            experts = self._entry(name).get_shape()[0]
            self._experts |= {expert.name: expert for expert in expert_tensors(name, experts)}
        self.names = {*self._experts, *(name for name in files if not is_stacked(name))}

    def open(self, name: str) -> Any:
        """Return a safetensors slice, which reads only what it is indexed with; an expert's tensor is read whole."""
        expert = self._experts.get(name)
        return self._entry(name) if expert is None else expert.read(self._entry(expert.stacked))

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a tensor; raise UserError if it is missing or quantized."""
        expert = self._experts.get(name)
        entry = self._entry(name if expert is None else expert.stacked)
        shape, word = tuple(entry.get_shape()), entry.get_dtype()
        if word not in _FLOATS:
            raise UserError(
                f"checkpoint: {name} in {self.folder} has type {word}, needs one of {', '.join(_FLOATS)}; "
                "use the model before its quantisation"
            )
        return shape if expert is None else expert.shape(shape), _FLOATS[word]

    def _entry(self, stored: str) -> Any:
        if stored not in self._files:
            raise UserError(f"checkpoint: {self.folder} has no tensor {stored}; it is not the model of its config.json")
        with _opened(self.folder / self._files[stored]) as file:
            return file.get_slice(stored)

    def check(self, model: ModelConfig, vocab_size: int) -> None:
        """Check that the folder's tensors are exactly the model's.

        Others are allowed: rotary frequencies, as in older files; a tied model's output matrix, if it equals the
        embedding; and the layers of a DeepSeek-V3 that predict more than the next token, which are left out.

        Raises:
            UserError: a tensor is missing, has another shape, or does not belong to this model; the message names it.
        """
        spare = {name for name in self.names if name.endswith("rotary_emb.inv_freq")}
        if model.multi_latent_attention and (further := read_config(self.folder).get("num_nextn_predict_layers")):
            layers = tuple(f"model.layers.{model.num_layers + layer}." for layer in range(further))
            left_out = {name for name in self.names if name.startswith(layers)}
            if left_out:
                logger.warning(
                    "checkpoint: %s has num_nextn_predict_layers %d; these layers, %d tensors, are left out",
                    self.folder, further, len(left_out),
                )  # fmt: skip
            spare |= left_out
        if not model.untie_embeddings_and_output_weights and _OUTPUT in self.names:
            if not torch.equal(self.open(_OUTPUT)[:], self.open(_EMBEDDING)[:]):
                raise UserError(
                    f"checkpoint: {self.folder} has {_OUTPUT} other than {_EMBEDDING}, but tie_word_embeddings true; "
                    "set it to false in config.json or remove the tensor"
                )
            spare.add(_OUTPUT)
        wanted = all_names(model)
        unknown = sorted(self.names - set(wanted) - spare)
        if unknown:
            raise UserError(f"checkpoint: {self.folder} has {unknown[0]}, which this model has no place for")
        for name in wanted:
            shape, needed = self.described(name)[0], full_shape(name, model, vocab_size)
            if shape != needed:
                raise UserError(
                    f"checkpoint: {name} in {self.folder} is {list(shape)}, its config needs {list(needed)}"
                )


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise UserError(f"checkpoint: {path} is damaged ({error}); download or convert it again") from None
