"""Read a Hugging Face model folder: its configuration and its tensors.

gpt-oss's files stack the matrices of all experts of a layer. Here each of the E experts has its own tensors:

    mlp.experts.gate_up_proj       [E, D, 2 F]    mlp.experts.{e}.gate_proj.weight, .up_proj.weight [F, D]
    mlp.experts.gate_up_proj_bias  [E, 2 F]       mlp.experts.{e}.gate_proj.bias, .up_proj.bias [F]
    mlp.experts.down_proj          [E, F, D]      mlp.experts.{e}.down_proj.weight [D, F]
    mlp.experts.down_proj_bias     [E, D]         mlp.experts.{e}.down_proj.bias [D]

The matrices are transposed, and columns of gate and up alternate. D: hidden size; F: width of an expert.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.checkpoint.hf.config import model_config
from megatron_ext.checkpoint.hf.names import full_shape, parameters_of
from megatron_ext.checkpoint.manifest import check_inside
from megatron_ext.checkpoint.tensors import DTYPES
from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError
from megatron_ext.files.reading import read_object

logger = logging.getLogger(__name__)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = {word: dtype for word, dtype in DTYPES.items() if dtype.is_floating_point}
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def stacked_name(name: str) -> str:
    """Return the name of gpt-oss's stacked tensor that contains an expert's; other names are returned unchanged."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    matrices = "down" if match[3] == "down" else "gate_up"
    return f"{match[1]}.{matrices}_proj{'_bias' if match[4] == 'bias' else ''}"


def stack(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the stacked tensor of a name in files: of expert 0, its gate and up or its down, then of expert 1, ..."""
    parts = torch.stack(list(tensors)).unflatten(0, (-1, 2 if "gate_up" in name else 1))  # [E, 1 or 2, rows(, columns)]
    turned = parts.transpose(1, 2) if parts.ndim == 3 else parts.permute(0, 3, 2, 1)
    return turned.flatten(-2).contiguous()


def shapes_in_files(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a model's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (name for row in parameters_of(model) for place in row.places(model) for name in row.names(place)):
        shape = full_shape(name, model, vocab_size)
        stacked = stacked_name(name) if model.block == "gpt_oss" else name
        if stacked != name:
            rows, *columns = shape
            shape = (model.num_experts or 0, *columns, 2 * rows if "gate_up" in stacked else rows)
        shapes[stacked] = shape
    return shapes


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


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer that this package and transformers can load."""
    return any(path.is_file() for pattern in ("tokenizer.json", "*.model") for path in folder.glob(pattern))


class HuggingFaceTensors:
    """Reads the tensors of a folder's safetensors files, one at a time.

    Attributes:
        folder: the model folder.
        names: those of its tensors.

    Raises:
        UserError: there are no safetensors, or the index is damaged or names a missing file or one outside the folder.
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
        self.names = set(files)

    def open(self, name: str) -> Any:
        """Return a safetensors slice, which reads only what it is indexed with; part of a stacked tensor is read."""
        entry, match = self._entry(name), _EXPERT.fullmatch(name)
        if match is None or name in self._files:
            return entry
        expert, matrix = int(match[2]), match[3]
        columns = slice(int(matrix == "up"), None, 1 if matrix == "down" else 2)
        return entry[expert : expert + 1][0, ..., columns].movedim(-1, 0).contiguous()

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a tensor, or of the stacked one that contains it.

        Raises:
            UserError: it is missing or quantized.
        """
        entry = self._entry(name)
        if (word := entry.get_dtype()) not in _FLOATS:
            raise UserError(
                f"checkpoint: {name} in {self.folder} has type {word}, needs one of {', '.join(_FLOATS)}; "
                "use the model before its quantisation"
            )
        return tuple(entry.get_shape()), _FLOATS[word]

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
        wanted = shapes_in_files(model, vocab_size)
        unknown = sorted(self.names - set(wanted) - spare)
        if unknown:
            raise UserError(f"checkpoint: {self.folder} has {unknown[0]}, which this model has no place for")
        for name, needed in wanted.items():
            if (shape := self.described(name)[0]) != needed:
                raise UserError(
                    f"checkpoint: {name} in {self.folder} is {list(shape)}, its config needs {list(needed)}"
                )


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise UserError(f"checkpoint: {path} is damaged ({error}); download or convert it again") from None
