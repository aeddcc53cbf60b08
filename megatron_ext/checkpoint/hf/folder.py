"""Read a Hugging Face model folder: its configuration and its tensors.

gpt-oss's files stack the matrices of all experts of a layer. Here each of the E experts has its own tensors:

    mlp.experts.gate_up_proj       [E, D, 2 F]    mlp.experts.{e}.gate_proj.weight, .up_proj.weight [F, D]
    mlp.experts.gate_up_proj_bias  [E, 2 F]       mlp.experts.{e}.gate_proj.bias, .up_proj.bias [F]
    mlp.experts.down_proj          [E, F, D]      mlp.experts.{e}.down_proj.weight [D, F]
    mlp.experts.down_proj_bias     [E, D]         mlp.experts.{e}.down_proj.bias [D]

The matrices are transposed, and columns of gate and up alternate. D: hidden size; F: width of an expert.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.checkpoint.hf.config import model_config
from megatron_ext.checkpoint.manifest import check_inside
from megatron_ext.checkpoint.parameters import full_shape, parameters_of
from megatron_ext.checkpoint.tensors import DTYPES
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError, echo, library_errors
from megatron_ext.files.reading import JsonObject, read_object

logger = logging.getLogger(__name__)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_FLOATS = {word: dtype for word, dtype in DTYPES.items() if dtype.is_floating_point}
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def stacked_name(name: str) -> str:
    """Return the name of gpt-oss's stacked tensor that contains an expert's; other names are returned unchanged."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    experts, _, matrix, kind = match.groups()
    matrices = "down" if matrix == "down" else "gate_up"
    ending = "_bias" if kind == "bias" else ""
    return f"{experts}.{matrices}_proj{ending}"


def stack(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Stack the matrices or biases of experts as files do, in order: the gate and up, or the down, of expert 0, ..."""
    per_expert = 2 if "gate_up" in name else 1
    parts = torch.stack(list(tensors)).unflatten(0, (-1, per_expert))  # [E, 1 or 2, rows(, columns)]
    parts = parts.movedim(1, -1)
    if parts.ndim == 4:  # a matrix
        parts = parts.transpose(1, 2)
    return parts.flatten(-2).contiguous()


def shapes_in_files(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a model's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    names = [name for row in parameters_of(model) for place in row.places(model) for name in row.names(place)]
    for name in names:
        shape = full_shape(name, model, vocab_size)
        stacked = stacked_name(name) if model.traits.stacked_experts else name
        if stacked != name:
            rows, *columns = shape
            shape = (model.num_experts or 0, *columns, 2 * rows if "gate_up" in stacked else rows)
        shapes[stacked] = shape
    return shapes


def is_hugging_face(folder: Path) -> bool:
    """Return whether the folder has a Hugging Face model, or an adapter of one, which `read_model_config` refuses."""
    return (folder / "config.json").is_file() or (folder / ADAPTER).is_file()


def read_model_config(folder: Path) -> ModelConfig:
    """Read a model's shapes from its config.json; `vocab_size` is the number of rows of the embedding.

    Raises:
        UserError: the file is missing, or the architecture or an entry is not supported, or an adapter is there.
    """
    if (folder / ADAPTER).is_file():  # transformers applies it if peft is installed
        raise UserError(f"checkpoint: {folder} has {ADAPTER}; merge the adapter into its model with peft first")
    entries = read_config(folder)
    try:
        return model_config(entries)
    except UserError as error:
        raise UserError(f"checkpoint: {folder / 'config.json'} {error}") from None


def read_config(folder: Path) -> JsonObject:
    """Read the entries of config.json; raise UserError if it is missing or damaged."""
    remedy = "give a Hugging Face model folder"
    entries = read_object(folder / "config.json", f"holds no JSON object; {remedy}")
    if entries is None:
        raise UserError(f"checkpoint: {folder} has no config.json; {remedy}")
    return entries


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer that this package and transformers can load."""
    return any(path.is_file() for pattern in ("tokenizer.json", "*.model") for path in folder.glob(pattern))


class HuggingFaceTensors:
    """Reads, one at a time, the tensors that transformers loads: of `model.safetensors`, or else of the index's files.

    Attributes:
        folder: the model folder.
        names: the names of its tensors.

    Raises:
        UserError: there are no safetensors, or the index is damaged, names files elsewhere, or does not fit its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, str] = {}
        if any(folder.glob("shard-*-model-*-of-*.safetensors")):  # transformers loads these first
            raise UserError(f"checkpoint: {folder} holds a distributed checkpoint; load it in transformers and save it")
        if (folder / SINGLE).is_file():
            self._add(SINGLE)
        else:
            self._read_index()
        self.names = set(self._files)

    def _read_index(self) -> None:
        index = self.folder / INDEX
        damaged = "is damaged, it maps no tensors to files; download it again"
        content = read_object(index, damaged)
        if content is None:
            raise UserError(f"checkpoint: {self.folder} holds no {SINGLE}; convert the model to safetensors first")
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} {damaged}")
        for file in weight_map.values():
            check_inside(file, index, "checkpoint")
        for file in dict.fromkeys(weight_map.values()):
            self._add(file)
        for name, file in weight_map.items():
            if self._files.get(name) != file:
                raise UserError(f"{index} names {file} for {name}, which that file lacks; download both again")

    def _add(self, file: str) -> None:
        """Note the tensors of a file."""
        with _opened(self.folder / file) as tensors:
            names = tensors.keys()
        for name in sorted(names):
            if name in self._files:
                raise UserError(
                    f"{self.folder / INDEX}: {name} is in {self._files[name]} and in {file}; download them again"
                )
            self._files[name] = file

    def open(self, name: str) -> Any:
        """Return a safetensors slice, which reads only what it is indexed with; part of a stacked tensor is read."""
        entry = self._entry(name)
        match = _EXPERT.fullmatch(name)
        if match is None or name in self._files:
            return entry
        expert = int(match[2])
        stacked = entry[expert : expert + 1][0]
        columns = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[match[3]]
        return stacked[..., columns].movedim(-1, 0).contiguous()

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a tensor, or of the stacked one that contains it.

        Raises:
            UserError: it is missing or quantized.
        """
        entry = self._entry(name)
        dtype = entry.get_dtype()
        if dtype not in _FLOATS:
            raise UserError(
                f"checkpoint: {name} in {self.folder} has type {dtype}, needs one of {', '.join(_FLOATS)}; "
                "use the model before its quantization"
            )
        return tuple(entry.get_shape()), _FLOATS[dtype]

    def _entry(self, name: str) -> Any:
        stored = name if name in self._files else stacked_name(name)
        if stored not in self._files:
            raise UserError(f"checkpoint: {self.folder} has no tensor {name}; it is not the model of its config.json")
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
        if model.multi_latent_attention:
            spare |= self._of_further_layers(model)
        if not model.untie_embeddings_and_output_weights and _OUTPUT in self.names:
            if not torch.equal(self.open(_OUTPUT)[:], self.open(_EMBEDDING)[:]):
                raise UserError(
                    f"checkpoint: {self.folder} has {_OUTPUT} other than {_EMBEDDING}, but tie_word_embeddings true; "
                    "set it to false in config.json or remove the tensor"
                )
            spare.add(_OUTPUT)
        needed = shapes_in_files(model, vocab_size)
        shapes = {name: self.described(name)[0] for name in sorted(self.names - spare)}
        for name in shapes:
            if name not in needed:
                raise UserError(f"checkpoint: {self.folder} has {name}, which this model has no place for")
        for name, needed_shape in needed.items():
            shape = shapes.get(name) or self.described(name)[0]
            if shape != needed_shape:
                raise UserError(
                    f"checkpoint: {name} in {self.folder} is {[*shape]}, its config needs {[*needed_shape]}"
                )

    def _of_further_layers(self, model: ModelConfig) -> set[str]:
        """Return the tensors of layers that predict more than the next token, and warn that they are left out."""
        further = read_config(self.folder).get("num_nextn_predict_layers") or 0
        layers = tuple(f"model.layers.{model.num_layers + layer}." for layer in range(further))
        left_out = {name for name in self.names if name.startswith(layers)}
        if left_out:
            logger.warning(
                "checkpoint: %s has num_nextn_predict_layers %d; these layers, %d tensors, are left out",
                self.folder, further, len(left_out),
            )  # fmt: skip
        return left_out


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file that transformers loads; raise UserError if the system refuses, as on a full disk."""
    remedy = "make room or choose another folder"
    with library_errors(lambda reason: UserError(f"output: {path} cannot be written ({reason}); {remedy}")):
        save_file(tensors, path, metadata={"format": "pt"})


def _opened(path: Path) -> Any:
    if not os.path.isfile(path):  # also False for a name that is too long for the system
        raise UserError(f"checkpoint: {path.parent} lacks {echo(path.name)}, which its index names; download it again")
    remedy = "download or convert it again"
    with library_errors(lambda reason: UserError(f"checkpoint: {path} cannot be read ({reason}); {remedy}")):
        return safe_open(path, "pt")
