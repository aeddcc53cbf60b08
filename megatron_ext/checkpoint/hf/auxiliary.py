"""Copy the small files beside a model's weights: tokenizer, generation settings, config.json."""

import contextlib
import glob
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.hf.config import comparable, hugging_face_config
from megatron_ext.checkpoint.hf.folder import read_config, read_model_config
from megatron_ext.config import ModelConfig
from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import UserError

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.model.v*", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "chat_templates/*.jinja", "generation_config.json"),
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_files(source: Path, target: Path, *more: str) -> None:
    """Copy a folder's tokenizer and generation files, and the files in `more`, byte for byte.

    Raises:
        UserError: a link that leads out of the folder, or nowhere.
    """
    for pattern in (*_FILES, *more):
        for name in sorted(glob.glob(pattern, root_dir=source)):  # Path.glob omits broken links
            if not (source / name).is_dir():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(_content(source, name), target / name)


def _content(folder: Path, name: str) -> Path:
    """Return the regular file that a name refers to.

    A copy may be published, so a link must not copy a file from elsewhere. Its target must be inside the folder, or in
    the blobs of Hugging Face's cache:

        models--org--name/snapshots/REVISION/generation_config.json -> ../../blobs/SHA
    """
    home, content = folder.resolve(), (folder / name).resolve()
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not content.is_file() or not any(content.is_relative_to(place) for place in allowed):
        raise UserError(f"checkpoint: {folder / name} is a link to {content}; put a copy in its place, or remove it")
    return content


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer that this package and transformers can load."""
    return any(path.is_file() for pattern in ("tokenizer.json", "*.model") for path in folder.glob(pattern))


def tokenizer_folder(name: str | None) -> Path | None:
    """Return the folder of an export's tokenizer; None for an export without one, if `name` is "none".

    Raises:
        UserError: `name` is neither a folder with a tokenizer that transformers can load nor a file in one.
    """
    if name == "none":
        return None
    path = Path(name or "none")
    folder = path if path.is_dir() else path.parent
    if not path.exists() or not has_tokenizer(folder):
        raise UserError(
            f"tokenizer: got {name}, needs a folder with tokenizer.json or a SentencePiece .model for transformers; "
            "give --tokenizer FOLDER, or --tokenizer none to export without"
        )
    return folder


def write_config(folder: Path, model: ModelConfig, length: int, dtype: torch.dtype, tokenizer: Path | None) -> None:
    """Write config.json of a model with `vocab_size`, trained on rows of `length` tokens, with weights of `dtype`.

    If the tokenizer's folder has a config.json that describes exactly this model, as for a model from Hugging Face,
    that file is copied, unless it names code (`auto_map`). Otherwise shapes and rotary options are those of the run,
    and special tokens are those of that file, or the tokenizer's end token.
    """
    name = str(dtype).removeprefix("torch.")
    special: dict[str, Any] = dict.fromkeys(_SPECIAL)  # not transformers' defaults, which belong to other models
    if tokenizer is not None and (tokenizer / "config.json").is_file():
        theirs, described = read_config(tokenizer), None
        special = {token: theirs.get(token) for token in _SPECIAL}
        with contextlib.suppress(UserError):  # the tokenizer may be that of an unsupported model
            described = comparable(read_model_config(tokenizer))
        same = described == comparable(model) and theirs.get("dtype", theirs.get("torch_dtype")) == name
        if same and "auto_map" not in theirs and theirs.get("max_position_embeddings", 0) >= length:
            shutil.copyfile(_content(tokenizer, "config.json"), folder / "config.json")
            return
    elif tokenizer is not None:
        with contextlib.suppress(UserError):  # a tokenizer may have no end token
            special["eos_token_id"] = Tokenizer(tokenizer).eod_id  # no begin token: our rows have none
    assert model.vocab_size is not None
    entries = hugging_face_config(model, model.vocab_size, length) | special | {"torch_dtype": name}
    (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
