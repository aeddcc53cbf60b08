"""Read a Hugging Face model folder: its configuration and its tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_ext.checkpoint.hf.config import model_config
from megatron_ext.checkpoint.hf.names import all_names, full_shape
from megatron_ext.checkpoint.hf.stacked import ExpertTensor, expert_tensors, is_stacked
from megatron_ext.checkpoint.manifest import check_inside
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_object

logger = logging.getLogger(__name__)
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BY_WORD = {word: dtype for dtype, word in DTYPES.items()}


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
    """Read the entries of config.json.

    Raises:
        UserError: the file is missing or damaged.
    """
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

    Raises:
        UserError: there are no safetensors, or the index names a missing file or one outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / INDEX, folder / SINGLE
        if index.is_file():
            damaged = "is damaged, it maps no tensors to files; download it again"
            self._files: dict[str, str] = (read_object(index, damaged) or {}).get("weight_map", {})
            if not isinstance(self._files, dict) or not self._files:
                raise UserError(f"{index} {damaged}")
            for name in self._files.values():
                check_inside(name, index, "checkpoint")
        elif single.is_file():
            with _opened(single) as file:
                self._files = dict.fromkeys(file.keys(), single.name)
        else:
            raise UserError(f"checkpoint: {folder} holds no model.safetensors; convert the model to safetensors first")
        missing = sorted({name for name in self._files.values() if not (folder / name).is_file()})
        if missing:
            raise UserError(f"checkpoint: {folder} lacks {missing[0]}, which its index names; download it again")
        self._experts: dict[str, ExpertTensor] = {}
        for name in filter(is_stacked, self._files):
            self._experts |= {expert.name: expert for expert in expert_tensors(name, self.described(name)[0][0])}

    def __iter__(self) -> Iterator[str]:
        return iter([*(name for name in self._files if not is_stacked(name)), *self._experts])

    def __contains__(self, name: object) -> bool:
        return name in self._experts or (name in self._files and not is_stacked(str(name)))

    def open(self, name: str) -> Any:
        """Return a safetensors slice, which reads only what it is indexed with; an expert's tensor is read whole.

        Raises:
            UserError: it is missing.
        """
        expert = self._experts.get(name)
        stored = name if expert is None else expert.stacked
        with self._file_of(stored) as file:
            entry = file.get_slice(stored)
            return entry if expert is None else expert.read(entry)

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a tensor.

        Raises:
            UserError: it is missing, or its dtype is not a floating-point type of 16 to 64 bits.
        """
        expert = self._experts.get(name)
        stored = name if expert is None else expert.stacked
        with self._file_of(stored) as file:
            entry = file.get_slice(stored)
            shape, word = tuple(entry.get_shape()), entry.get_dtype()
        if word not in _BY_WORD:
            raise UserError(
                f"checkpoint: {name} in {self.folder} has type {word}, needs one of {', '.join(_BY_WORD)}; "
                "use the model before its quantisation"
            )
        return shape if expert is None else expert.shape(shape), _BY_WORD[word]

    def check(self, model: ModelConfig, vocab_size: int) -> None:
        """Check that the folder's tensors are exactly the model's.

        Others are allowed: rotary frequencies, as in older files; a tied model's output matrix, if it equals the
        embedding; and the layers of a DeepSeek-V3 that predict more than the next token, which are left out.

        Raises:
            UserError: a tensor is missing, has another shape, or does not belong to this model; the message names it.
        """
        names = all_names(model)
        spare = {name for name in self if name.endswith("rotary_emb.inv_freq")} | self._left_out(model)
        if not model.untie_embeddings_and_output_weights and _OUTPUT in self:
            if not torch.equal(self.open(_OUTPUT)[:], self.open(_EMBEDDING)[:]):
                raise UserError(
                    f"checkpoint: {self.folder} has {_OUTPUT} other than {_EMBEDDING}, but tie_word_embeddings true; "
                    "set it to false in config.json or remove the tensor"
                )
            spare.add(_OUTPUT)
        unknown = sorted(set(self) - set(names) - spare)
        if unknown:
            raise UserError(f"checkpoint: {self.folder} has {unknown[0]}, which this model has no place for")
        for name in names:
            shape, wanted = self.described(name)[0], full_shape(name, model, vocab_size)
            if shape != wanted:
                raise UserError(
                    f"checkpoint: {name} in {self.folder} is {list(shape)}, its config needs {list(wanted)}"
                )

    def _left_out(self, model: ModelConfig) -> set[str]:
        """Return the tensors of multi-token prediction: those of layers after the last one."""
        if not model.multi_latent_attention:
            return set()
        further = read_config(self.folder).get("num_nextn_predict_layers") or 0
        layers = range(model.num_layers, model.num_layers + further)
        names = {name for name in self if name.startswith(tuple(f"model.layers.{layer}." for layer in layers))}
        if names:
            logger.warning(
                "checkpoint: %s has num_nextn_predict_layers %d; these layers, %d tensors, are left out",
                self.folder, further, len(names),
            )  # fmt: skip
        return names

    def _file_of(self, name: str) -> Any:
        if name not in self._files:
            raise UserError(f"checkpoint: {self.folder} has no tensor {name}; it is not the model of its config.json")
        return _opened(self.folder / self._files[name])


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise UserError(f"checkpoint: {path} is damaged ({error}); download or convert it again") from None
