"""A Hugging Face model folder: its shapes as our configuration, its tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.errors import UserError

_FAMILIES = ("llama", "qwen2", "mistral")
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def is_hugging_face(folder: Path) -> bool:
    """Whether the folder holds a Hugging Face model."""
    return (folder / "config.json").is_file()


def read_model_config(folder: Path) -> ModelConfig:
    """The shapes of a Llama, a Qwen2 or a Mistral; `vocab_size` is the embedding's rows.

    Raises:
        UserError: no such file, another architecture, or one whose computation ours does not have; by name.
    """
    path = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint: cannot read {path} ({error}); give a Hugging Face model folder") from None
    if not isinstance(found, dict):
        raise UserError(f"checkpoint: {path} holds no JSON object; give a Hugging Face model folder")
    family = found.get("model_type")
    if family not in _FAMILIES:
        raise UserError(f"checkpoint: {path} has model_type {family!r}, needs one of {', '.join(_FAMILIES)}")
    _check_values(found, path)
    _check_expressible(found, path)
    heads = found["num_attention_heads"]
    return ModelConfig(
        num_layers=found["num_hidden_layers"],
        hidden_size=found["hidden_size"],
        ffn_hidden_size=found["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=found.get("num_key_value_heads") or heads,
        kv_channels=found.get("head_dim"),
        vocab_size=found["vocab_size"],
        norm_epsilon=found["rms_norm_eps"],
        rotary_base=_rope(found).get("rope_theta", 10_000.0),
        untie_embeddings_and_output_weights=not found.get("tie_word_embeddings", False),
        add_qkv_bias=family == "qwen2",
        local_window=found.get("sliding_window") if family == "mistral" else None,
    )


def _rope(found: dict[str, Any]) -> dict[str, Any]:
    """Rotary options; where both stand, transformers takes the old style's."""
    old = {"rope_theta": found["rope_theta"]} if "rope_theta" in found else {}
    return old | (found.get("rope_scaling") or found.get("rope_parameters") or {})


def _check_values(found: dict[str, Any], path: Path) -> None:
    for names, kind in ((_SIZES, int), (("rms_norm_eps",), float)):
        for name in names:
            if type(found.get(name)) is not kind:
                raise UserError(f"checkpoint: {path} has {name} {found.get(name)!r}, needs one of type {kind.__name__}")


def _check_expressible(found: dict[str, Any], path: Path) -> None:
    rope = _rope(found)
    kind = rope.get("rope_type", rope.get("type", "default"))
    unlike = {
        "hidden_act": (found.get("hidden_act", "silu"), "silu"),
        "rope_type": (kind, "default"),
        "mlp_bias": (found.get("mlp_bias", False), False),
        "use_sliding_window": (found.get("use_sliding_window", False), False),
    }
    if found["model_type"] == "llama":
        unlike["attention_bias"] = (found.get("attention_bias", False), False)
    for name, (value, ours) in unlike.items():
        if value != ours:
            raise UserError(f"checkpoint: {path} has {name} {value!r}, this model has {ours!r} only; use another model")


class HuggingFaceTensors:
    """The tensors of a folder's safetensors files, read one at a time.

    Raises:
        UserError: no safetensors, or an index that names a missing file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            try:
                self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"checkpoint: {index} is damaged ({error!r}); download it again") from None
        elif single.is_file():
            with _opened(single) as file:
                self._files = dict.fromkeys(file.keys(), single.name)
        else:
            raise UserError(f"checkpoint: {folder} holds no model.safetensors; convert the model to safetensors first")
        missing = sorted({name for name in self._files.values() if not (folder / name).is_file()})
        if missing:
            raise UserError(f"checkpoint: {folder} lacks {missing[0]}, which its index names; download it again")

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            UserError: it is not there.
        """
        if name not in self._files:
            raise UserError(f"checkpoint: {self.folder} has no tensor {name}; it is not the model of its config.json")
        with _opened(self.folder / self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise UserError(f"checkpoint: {path} is damaged ({error}); download or convert it again") from None
