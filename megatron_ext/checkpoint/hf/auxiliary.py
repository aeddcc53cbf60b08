"""Copy the small files beside a model's weights: tokenizer, generation settings, config.json."""

from __future__ import annotations

import contextlib
import glob
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.checkpoint.hf.folder import read_config, read_model_config
from megatron_ext.config import ModelConfig
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError

CARRIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.model.v*", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "chat_templates/*.jinja", "generation_config.json"),
)
_TOKENIZER = ("tokenizer.json", "*.model")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# options that do not change what a model computes
_UNLIKE: dict[str, Any] = {"model_preset": None, "init_method_std": 0.02, "hidden_dropout": 0.0}


def auxiliary_files(folder: Path) -> Iterator[Path]:
    """Yield a folder's tokenizer and generation files, relative to it."""
    for pattern in CARRIED:
        names = map(Path, sorted(glob.glob(pattern, root_dir=folder)))  # Path.glob omits broken links
        yield from (name for name in names if (folder / name).is_file() or (folder / name).is_symlink())


def carry(source: Path, target: Path, *more: str) -> list[Path]:
    """Copy the auxiliary files and the files in `more`, byte for byte, and return their names.

    The copies may be published, so a link must not copy a file from elsewhere. Its target must be inside the folder, or
    in the blobs of Hugging Face's cache:

        models--org--name/snapshots/REVISION/generation_config.json -> ../../blobs/SHA

    Raises:
        UserError: a link with another target, or a broken link.
    """
    names = [*auxiliary_files(source), *map(Path, more)]
    contents = [_content(source, name) for name in names]
    for name, content in zip(names, contents, strict=True):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(content, target / name)
    return names


def _content(folder: Path, name: Path) -> Path:
    """Return the regular file that a name refers to."""
    try:
        home, content = folder.resolve(), (folder / name).resolve(strict=True)
    except (OSError, RuntimeError):  # a broken link, or a cycle of links
        home, content = folder, Path()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not content.is_file() or not any(content.is_relative_to(allowed) for allowed in homes):
        raise UserError(
            f"checkpoint: {folder / name} is a link to {content if content.name else 'nothing'}, needs a file of its "
            "own folder to copy; put a copy in the link's place, or remove it"
        )
    return content


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer that this package and transformers can load."""
    return any(path.is_file() for pattern in _TOKENIZER for path in folder.glob(pattern))


def tokenizer_folder(given: str | None, own: str | None) -> Path | None:
    """Return the folder of an export's tokenizer; None for an export without one.

    Args:
        given: a folder, "none", or None for the run's own tokenizer.
        own: the run's tokenizer, as named in its configuration.

    Raises:
        UserError: the run's tokenizer no longer exists, or transformers cannot load it.
    """
    word = given if given is not None else own
    if word == "none":
        return None
    if word is None:
        raise UserError("tokenizer: the run names none; give --tokenizer FOLDER, or --tokenizer none to go without")
    path = Path(word)
    folder = path if path.is_dir() else path.parent
    if not path.exists() or not has_tokenizer(folder):
        raise UserError(
            f"tokenizer: {word} is no folder with tokenizer.json or a SentencePiece .model, which transformers needs; "
            "give --tokenizer FOLDER, or --tokenizer none to go without"
        )
    return folder


def write_config(folder: Path, model: ModelConfig, length: int, dtype: torch.dtype, beside: Path | None) -> None:
    """Write config.json.

    If the tokenizer's folder has a config.json that describes exactly this model, as for a model from Hugging Face,
    that file is copied. Otherwise shapes and rotary options are those of the run, and special tokens are those of that
    file, or the tokenizer's end token.

    Args:
        folder: the output folder.
        model: the shapes, with `vocab_size`.
        length: tokens of the run's rows, the minimum of `max_position_embeddings`.
        dtype: dtype of the weights.
        beside: the tokenizer's folder.
    """
    template = beside / "config.json" if beside is not None and (beside / "config.json").is_file() else None
    word = str(dtype).removeprefix("torch.")
    if template is not None and _describes(template, model, length, word):
        shutil.copyfile(_content(template.parent, Path(template.name)), folder / "config.json")
        return
    assert model.vocab_size is not None
    special: dict[str, int | None] = dict.fromkeys(_SPECIAL)  # not transformers' defaults, which belong to other models
    if template is not None:
        theirs = read_config(template.parent)
        special = {name: theirs.get(name) for name in _SPECIAL}
    elif beside is not None:
        with contextlib.suppress(UserError):  # a tokenizer may have no end token
            special["eos_token_id"] = Tokenizer(beside).eod_id  # no begin token: our rows have none
    entries = hugging_face_config(model, model.vocab_size, length) | special | {"torch_dtype": word}
    (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n")


def _describes(template: Path, model: ModelConfig, length: int, dtype: str) -> bool:
    """Return whether a config.json describes this model, with this dtype and rows of this length."""
    entries = read_config(template.parent)
    if entries.get("dtype", entries.get("torch_dtype")) != dtype or entries.get("max_position_embeddings", 0) < length:
        return False
    try:
        theirs = read_model_config(template.parent)
    except UserError:  # the tokenizer may be that of an unsupported model
        return False
    return comparable(theirs) == comparable(model)


def comparable(model: ModelConfig) -> ModelConfig:
    """Return the model without the options that do not affect its results."""
    if model.num_experts is not None:
        model = replace(model, moe_ffn_hidden_size=model.expert_width, ffn_hidden_size=model.expert_width)
    return replace(model, **_UNLIKE, kv_channels=model.head_size, make_vocab_size_divisible_by=1)
