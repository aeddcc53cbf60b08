"""Checkpoints: all that a run continues from, complete or absent.

    RUN/checkpoints/iter_0000040/            Megatron's torch_dist format
    RUN/checkpoints/latest_checkpointed_iteration.txt

A checkpoint is written into a folder of another name and renamed when it is whole; only then does the pointer
name it. Weights and optimizer state load under any layout with the same kind of optimizer (distributed or not),
random states under the same layout.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_ext.arguments import to_dict
from megatron_ext.config import Config
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.optimizer import unwrap
from megatron_ext.engine.parallel import Ranks
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)

_POINTER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: completed optimizer steps; the next one has this number.
        consumed_samples: rows that they took.
    """

    step: int
    consumed_samples: int


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, None where there is none.

    Raises:
        UserError: the pointer names a checkpoint that is not there.
    """
    pointer = run / "checkpoints" / _POINTER
    if not pointer.is_file():
        return None
    text = pointer.read_text().strip()
    folder = pointer.parent / _folder_name(int(text)) if text.isdecimal() else pointer.parent / text
    if not (folder / "metadata.json").is_file():
        raise UserError(
            f"load: {pointer} names {text!r}, but {folder} is no checkpoint; name another step in {_POINTER}"
        )
    return folder


def load_weights(chunks: Sequence[PackedGPT], folder: Path) -> None:
    """Read a checkpoint's weights alone, under any layout; all processes call it."""
    state = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(state, str(folder))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])


def saved_config(folder: Path) -> dict[str, Any]:
    """The configuration, section by section, of the run that wrote a checkpoint."""
    found: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))["config"]
    return found


class Checkpointer:
    """Saves and loads the model, the optimizer, the random states and the position."""

    def __init__(
        self, model: list[DistributedDataParallel], optimizer: MegatronOptimizer, config: Config, ranks: Ranks
    ) -> None:
        self.model, self.optimizer, self.config, self.ranks = model, optimizer, config, ranks

    def save(self, run: Path, position: Position) -> Path:
        """Write the checkpoint of `position`; all processes call it. Returns its folder."""
        folder = run / "checkpoints" / _folder_name(position.step)
        aside = folder.with_name(folder.name + ".incomplete")
        if self.ranks.world == 0:
            _remove_incomplete(folder.parent)
            aside.mkdir(parents=True)
        self._finish_param_gather()
        state = self._sharded_state(loading=False, random_states=True)
        state["position"] = vars(position)
        state["config"] = to_dict(self.config)
        state["layout"] = self._layout
        dist.barrier()
        dist_checkpointing.save(state, str(aside), content_metadata=self._optimizer_format(serialisable=True))
        dist.barrier()
        if self.ranks.world == 0:
            _publish(aside, folder)
        dist.barrier()
        return folder

    def load(self, folder: Path) -> Position:
        """Read a checkpoint into the model and the optimizer; all processes call it.

        Raises:
            UserError: it holds a model of another shape, or the state of the other kind of optimizer.
        """
        common = dist_checkpointing.load_common_state_dict(str(folder))
        self._check_config(common["config"], folder)
        same_layout = common["layout"] == self._layout
        if not same_layout and self.ranks.world == 0:
            logger.info("checkpoint of another layout: random states start anew")
        state = dist_checkpointing.load(self._sharded_state(loading=True, random_states=same_layout), str(folder))
        for number, chunk in enumerate(unwrap(self.model)):
            chunk.load_state_dict(state[f"model{number}"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        if same_layout:
            _set_random_states(state["random_states"])
        return Position(**common["position"])

    @property
    def _layout(self) -> list[int]:
        ranks = self.ranks
        return [ranks.tensor_size, ranks.pipeline_size, ranks.context_size, ranks.data_size]

    def _check_config(self, saved: dict[str, Any], folder: Path) -> None:
        distributed = saved["parallel"]["use_distributed_optimizer"]
        if distributed != self.config.parallel.use_distributed_optimizer:
            word = "--use-distributed-optimizer" if distributed else "--no-use-distributed-optimizer"
            raise UserError(
                f"use_distributed_optimizer: got {not distributed}, {folder} needs {distributed}; add {word}"
            )
        for name, value in to_dict(self.config)["model"].items():
            if name != "model_preset" and saved["model"].get(name, value) != value:
                raise UserError(f"{name}: got {value}, {folder} needs {saved['model'][name]}; use its config.yaml")

    def _optimizer_format(self, serialisable: bool = False) -> dict[str, Any]:
        sharding = {"distrib_optim_sharding_type": "fully_reshardable"}
        return sharding if serialisable else sharding | {"dp_cp_group": self.ranks.data_context_group}

    def _sharded_state(self, loading: bool, random_states: bool) -> dict[str, Any]:
        metadata = self._optimizer_format()
        state: dict[str, Any] = {
            f"model{number}": chunk.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(unwrap(self.model))
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        if random_states:
            state["random_states"] = ShardedObject(
                "random_states", _random_states(), (self.ranks.world_size,), (self.ranks.world,)
            )
        return state

    def _finish_param_gather(self) -> None:
        for chunk in self.model:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _folder_name(step: int) -> str:
    return f"iter_{step:07d}"


def _remove_incomplete(checkpoints: Path) -> None:
    for folder in checkpoints.glob("iter_*.incomplete"):
        shutil.rmtree(folder)


def _publish(aside: Path, folder: Path) -> None:
    _sync_files(sorted(aside.rglob("*")))
    if folder.exists():  # the same step, saved again by a resumed run
        shutil.rmtree(folder)
    aside.rename(folder)
    pointer = folder.parent / _POINTER
    written = pointer.with_suffix(".incomplete")
    written.write_text(re.sub(r"\D", "", folder.name).lstrip("0") or "0")
    _sync_files([folder.parent, written])
    written.replace(pointer)
    _sync_files([folder.parent])


def _sync_files(paths: Sequence[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    cpu: Tensor = states["cpu"]
    torch.set_rng_state(cpu)
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
