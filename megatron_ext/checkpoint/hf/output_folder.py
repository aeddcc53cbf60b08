"""Write a converted model's folder atomically: under a temporary name, then renamed.

transformers' save_pretrained, safetensors and torch write into the folder directly. If a save_pretrained that replaces
a model of the same shapes is killed, it leaves a mixture of both models, which from_pretrained loads without a warning
(transformers 5.23).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_ext.checkpoint.folders import folder_name
from megatron_ext.checkpoint.hf.auxiliary import CARRIED
from megatron_ext.checkpoint.hf.folder import INDEX
from megatron_ext.errors import UserError
from megatron_ext.files.atomic import move_in, sync

_MODEL_FILES = ("config.json", "config.yaml")
_BESIDE = ("config.json", "chat_templates", *CARRIED)
_CHECKPOINT = f"checkpoints/{folder_name(0)}"
# all files that a conversion writes, as patterns of the parts of a path; nothing else is removed
_WRITTEN = (
    *("model*.safetensors", ".tmp*", INDEX, *_BESIDE),  # .tmp*: left by a killed save_file
    *("config.yaml", "hugging_face", *(f"hugging_face/{name}" for name in _BESIDE)),
    *("checkpoints", "checkpoints/latest_checkpointed_iteration.*", _CHECKPOINT, f"{_CHECKPOINT}/*"),
)
_OURS = [pattern.split("/") for pattern in _WRITTEN]


@contextmanager
def written_aside(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder; at the end it is renamed to `output`, after an exception it is deleted.

    The next conversion deletes the folder left by a killed one (OUTPUT.incomplete), and restores the folder that was
    being replaced (OUTPUT.replaced) if OUTPUT does not exist.

    Raises:
        UserError: `output` exists and `overwrite` is False, or a file to be removed was not written by a conversion.
    """
    output = Path(os.path.abspath(output))
    folder, old = (output.with_name(output.name + ending) for ending in (".incomplete", ".replaced"))
    for left in (folder, old):
        if left.exists() or left.is_symlink():
            _check_ours(left, "move it away")
    if old.is_dir() and not output.exists():  # killed between the two renames
        old.rename(output)
    if output.exists() or output.is_symlink():
        if not overwrite:
            raise UserError(f"output: {output} exists; choose another folder or add --overwrite")
        folder_here = output.is_dir() and not output.is_symlink()
        model = folder_here and any((output / name).is_file() for name in _MODEL_FILES)
        if not model and not (output.is_dir() and not any(output.iterdir())):
            raise UserError(f"output: {output} is not a model's folder, --overwrite will not remove it; choose another")
        _check_ours(output, "choose another folder")
    for left in (folder, old):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        sync(folder.rglob("*"))
    except BaseException:
        shutil.rmtree(folder)
        raise
    move_in(folder, output, old)
    shutil.rmtree(old, ignore_errors=True)
    sync([output.parent])


def _check_ours(folder: Path, remedy: str) -> None:
    """Raise UserError if a folder has anything that a conversion does not write, such as a training run or a link."""
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"output: {folder} is in the way and no folder of a conversion; {remedy}")
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        patterns = [pattern for pattern in _OURS if len(pattern) == len(parts)]
        ours = any(all(map(fnmatchcase, parts, pattern)) for pattern in patterns)
        if path.is_symlink() or not ours:
            raise UserError(f"output: {path} is nothing that a conversion writes and will not be removed; {remedy}")
