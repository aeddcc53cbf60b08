"""Read a checkpoint's tensors into this process's part of the model, without unpickling anything from it.

torch's distributed checkpoints hold pickles: `.metadata` (torch unpickles it outright), each tensor's record and
Megatron's common.pt. Here `.metadata` is read by an unpickler that finds no class (checkpoint/formats/metadata.py),
records and common.pt are read with weights_only, and byte objects (pickles by another name) are refused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from megatron_ext import heartbeat
from megatron_ext.checkpoint.formats.metadata import COMMON, read_metadata
from megatron_ext.engine import compat
from megatron_ext.errors import UserError, first_line


class RestrictedReader(FileSystemReader):
    """Reads distributed checkpoints as torch's reader does, but tensors alone; errors name the file."""

    def __init__(self, path: str | Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list of tensors, which has been read without unpickling."""
        metadata = self._metadata
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every planned tensor, file by file."""
        resolve = planner.resolve_tensor

        def resolve_and_beat(item: ReadItem) -> torch.Tensor:
            heartbeat.beat()
            return resolve(item)

        planner.resolve_tensor = resolve_and_beat  # type: ignore[method-assign, assignment]
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR  # read_metadata has refused all else
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except Exception as error:
                reason = first_line(error)
                raise UserError(f"load: {Path(self.path) / name} cannot be read: {reason[:200]}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_common(folder: Path) -> dict[str, Any]:
    """Read Megatron's common.pt, if it holds tensors and plain values alone.

    Raises:
        UserError: it holds anything else, or cannot be read.
    """
    path = folder / COMMON
    try:
        common = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"load: {path} cannot be read ({error.strerror}); take another checkpoint") from None
    except Exception as error:  # UnpicklingError for a class, and nearly anything for damage
        reason = first_line(error)
        raise UserError(f"load: {path} is no plain data ({reason[:200]}); take another checkpoint") from None
    if not isinstance(common, dict):
        raise UserError(f"load: {path} holds {type(common).__name__}, needs a mapping; take another checkpoint")
    return common


def read_sharded(state: dict[str, Any], folder: Path, *, same_shapes: bool = False) -> dict[str, Any]:
    """Read the sharded tensors of `state`, whatever the layout that wrote them; all processes call it.

    Args:
        state: what is to be read.
        folder: the checkpoint.
        same_shapes: the vocabulary has the same padding, too, which Megatron would cut or fill silently.

    Raises:
        UserError: a file cannot be read, by name; with `same_shapes` also a tensor of another shape.
    """
    metadata = read_metadata(folder)
    compat.install_reader(lambda path: RestrictedReader(path, metadata))
    state, _, factories = load_preprocess(state)
    sharded, _ = extract_sharded_base(state)
    if same_shapes:
        _check_shapes(sharded, metadata, folder)
    try:
        loaded = TorchDistLoadShardedStrategy().load(sharded, folder)
    except CheckpointException as error:  # no Exception of Python's, and its text is every process's traceback
        failures = [failure for failure, _ in error.failures.values()]
        refusal = next((failure for failure in failures if isinstance(failure, UserError)), None)
        raise RuntimeError(str(error)) if refusal is None else UserError(str(refusal)) from None
    merged: dict[str, Any] = apply_factory_merges(loaded, factories)
    return merged


def _check_shapes(sharded: dict[str, Any], metadata: Metadata, folder: Path) -> None:
    mine = None
    for tensor in nested_values(sharded):
        saved = metadata.state_dict_metadata.get(tensor.key)
        if isinstance(saved, TensorStorageMetadata) and tuple(saved.size) != tuple(tensor.global_shape):
            shapes = f"got {tuple(tensor.global_shape)}, {folder} needs {tuple(saved.size)}"
            mine = f"{tensor.key}: {shapes}; use its config.yaml and its tokenizer"
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)  # a pipeline's stages hold different tensors
    mistake = next((text for text in everyone if text is not None), None)
    if mistake is not None:
        raise UserError(mistake)
