"""Checkpoints: all that a run continues from, complete or absent, in Megatron's torch_dist format.

    RUN/checkpoints/iter_0000040/
        __<rank>_0.distcp     tensors of one process: weights, optimizer_state.py's form, random states
        .metadata             torch's list of them
        metadata.json         says torch_dist; common.pt: the step, for Megatron's own tools
        manifest.json         everything else (checkpoint/manifest.py), written last

A checkpoint is written into a folder of another name and renamed when it is whole; only then does the pointer
name it (checkpoint/folders.py). Weights and optimizer state load under any layout, random states under the same.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import Metadata

from megatron_ext.arguments import to_dict
from megatron_ext.checkpoint import changes, folders
from megatron_ext.checkpoint.manifest import FileFacts, Manifest, code_identity, facts_of
from megatron_ext.checkpoint.metadata import COMMON, METADATA
from megatron_ext.config import Config
from megatron_ext.engine import random_states
from megatron_ext.engine.damage import damage
from megatron_ext.engine.identity import data_fingerprints
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.optimizer import settle_parameters, unwrap
from megatron_ext.engine.optimizer_state import OptimizerState
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.restricted import read_common, read_sharded
from megatron_ext.engine.writer import Background, HashingWriter, Staging, plan
from megatron_ext.errors import UserError

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: completed optimizer steps; the next one has this number.
        consumed_samples: rows that they took.
    """

    step: int
    consumed_samples: int


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written."""

    run: Path
    aside: Path
    position: Position
    writer: HashingWriter
    writing: Background
    metadata: Metadata | None
    counters: dict[str, Any]


def load_weights(chunks: Sequence[PackedGPT], folder: Path) -> None:
    """Read a checkpoint's weights alone, under any layout, after comparing checksums; all processes call it.

    Raises:
        UserError: the checkpoint is damaged; the file at fault is named.
    """
    error = damage(folder)
    if error is not None:
        raise folders.with_offer(UserError(error), folder, folders.NAME_IT)
    loaded = read_sharded({f"model{number}": _weights(chunk) for number, chunk in enumerate(chunks)}, folder)
    for number, chunk in enumerate(chunks):
        _set_weights(chunk, loaded[f"model{number}"])


def saved_config(folder: Path) -> dict[str, Any]:
    """The configuration, section by section, of the run that wrote a checkpoint."""
    return Manifest.read(folder).config


class Checkpointer:
    """Saves and loads the model, the optimizer, the random states and the position.

    Every method is called by all processes together. With `async_save`, `save` returns when the tensors are
    copied; `poll` after a later step, or `finish`, publishes what has been written in the meantime.

    Attributes:
        saved: the newest complete checkpoint in --save: published by this process, or the one that it began from.
    """

    def __init__(
        self, model: list[DistributedDataParallel], optimizer: MegatronOptimizer, config: Config, ranks: Ranks
    ) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.options = config.checkpoint
        self.optimizer = OptimizerState(optimizer, config.training.bf16)
        self.saved: Path | None = None
        self._staging = Staging() if self.options.async_save else None
        self._pending: _Pending | None = None
        self._validated = False
        self._stalled = 0.0
        self._last_save = time.monotonic()

    def prepare(self, run: Path) -> None:
        """Make sure that a run folder can be written, before any step is done.

        Raises:
            UserError: it cannot.
        """

        def write() -> None:
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            probe = run / f".writable.{os.getpid()}"
            probe.write_text("")
            probe.unlink()
            _ = self._data  # as it is now; it may be gone or another one when the first checkpoint is written

        self._on_first(write, run)

    def poll(self, step: int) -> bool:
        """Publish a checkpoint that is written by now; whether the next is due after `step` steps."""
        options = self.options
        due = bool(options.save_interval) and step % options.save_interval == 0
        if self._pending is None and not options.save_seconds:
            return due
        by_clock = bool(options.save_seconds) and time.monotonic() - self._last_save >= options.save_seconds
        writing = self._pending is not None and not self._pending.writing.done
        began = time.perf_counter()
        facts = torch.tensor([writing, by_clock], dtype=torch.int, device=_device())
        dist.all_reduce(facts, dist.ReduceOp.MAX)
        still_writing, clock = facts.tolist()
        self._stalled += time.perf_counter() - began
        if self._pending is not None and not still_writing:
            self.finish()
        return due or bool(clock)

    def save(self, run: Path, position: Position) -> None:
        """Begin the checkpoint of `position`; without `async_save` it is published when this returns.

        Raises:
            UserError: a file cannot be written; it is named, and nothing of this checkpoint stays.
        """
        self.finish()
        began = time.perf_counter()
        self._last_save = time.monotonic()
        lost = f"the checkpoint of step {position.step}"
        aside = self._on_first(lambda: folders.begin(run, position.step), run, lost)
        settle_parameters(self.model)
        state, _ = save_preprocess(self._sharded_state(randomness=True), not self._validated)
        self._validated = True  # the same structure every time
        writer = HashingWriter(aside, self._staging)
        metadata = plan(state, writer)
        counters = self.optimizer.counters()
        self._pending = _Pending(run, aside, position, writer, Background(writer.write), metadata, counters)
        self._stalled += time.perf_counter() - began
        if not self.options.async_save:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and publish it.

        Raises:
            UserError: it could not be written; its folder is gone then, earlier checkpoints are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.perf_counter()
        pending.writing.wait()
        error = pending.writing.error
        mine = (pending.writer.files, pending.writer.results, pending.writer.seconds, error)
        everyone: list[Any] | None = [None] * self.ranks.world_size if self.ranks.world == 0 else None
        dist.gather_object(mine, everyone, dst=0)
        lost = f"the checkpoint of step {pending.position.step}"
        self.saved = self._on_first(lambda: self._publish(pending, everyone or []), pending.aside, lost)
        self._stalled += time.perf_counter() - began

    def take_stall(self) -> float:
        """Seconds that saving has held up training since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def load(self, folder: Path) -> Position:
        """Read a checkpoint into the model and the optimizer.

        Raises:
            UserError: it is damaged, of another shape, or of other options that `override` does not name.
        """
        folder = self._undamaged(folder)
        manifest = Manifest.read(folder).with_optimizer(folder)
        for change in changes.check(manifest.config, self.config, manifest.step, folder):
            self._log(f"changed since the checkpoint: {change}")
        self._on_first(lambda: self._check_data(manifest, folder), folder)
        if read_common(folder).get("iteration") != manifest.step:
            raise UserError(f"load: {folder / COMMON} is of another step than its manifest; take another checkpoint")
        same_layout = manifest.layout == self._layout
        if not same_layout:
            self._log("checkpoint of another layout: random states start anew (they matter to dropout alone)")
        self._take(folder, manifest, randomness=same_layout)
        self._rewind(folder)
        self._log(f"continuing from {folder} after {manifest.step} steps")
        return Position(manifest.step, manifest.consumed_samples)

    def load_optimizer(self, folder: Path) -> None:
        """Read the weights and the optimizer's state of another run's checkpoint.

        Raises:
            UserError: it is damaged, of another shape or precision, or holds weights alone.
        """
        error = damage(folder)
        if error is not None:
            raise folders.with_offer(UserError(error), folder, folders.NAME_IT)
        manifest = Manifest.read(folder).with_optimizer(folder, "leave --init-optimizer out")
        changes.check_shapes(manifest.config, self.config, folder)
        self._take(folder, manifest, randomness=False)

    def _take(self, folder: Path, manifest: Manifest, randomness: bool) -> None:
        state = read_sharded(self._sharded_state(randomness), folder, same_shapes=True)
        for number, chunk in enumerate(unwrap(self.model)):
            _set_weights(chunk, state[f"model{number}"])
        self.optimizer.load(state["optimizer"], manifest.optimizer)
        if randomness:
            random_states.restore(state["random_states"])

    def _undamaged(self, folder: Path) -> Path:
        """`folder`, or with `load_latest_complete` the newest one before it that is not damaged."""
        choices = [folder]
        if self.options.load_latest_complete:
            choices += folders.older(folder)
        for choice in choices:
            error = damage(choice, self.options.verify_load)
            if error is None:
                return choice
            if choice is choices[-1]:
                raise folders.with_offer(UserError(error), folder)
            self._log(f"{error}\nload_latest_complete: taking the one before")
        raise AssertionError("choices is not empty")

    def _check_data(self, manifest: Manifest, folder: Path) -> None:
        """Refuse other contents under the same names."""
        if {"data_path", "mixture"} & set(self.options.override):
            return
        for part, now, then in zip(self.config.data.parts, self._data, manifest.data, strict=False):
            if now != then:
                raise UserError(
                    f"load: {part.prefix} is not the data that {folder} was trained on: its size, beginning or end "
                    "differs; restore it, or add --override data_path to go on with the new one"
                )

    @functools.cached_property
    def _data(self) -> tuple[str, ...]:
        return tuple(data_fingerprints(self.config))

    def _rewind(self, folder: Path) -> None:
        run = folders.run_of(folder)
        if self.options.save and run.resolve() == Path(self.options.save).resolve():
            self.saved = Path(self.options.save) / "checkpoints" / folder.name
            for left in self._on_first(lambda: folders.rewind(folder), run):
                self._log(f"{left} is of the future that this run leaves; delete it if nobody wants it")

    def _publish(self, pending: _Pending, everyone: list[Any]) -> Path:
        """On process 0: complete the folder, give it its name, delete what need not stay."""
        for _, _, _, error in everyone:
            if error is not None:
                raise error
        aside, step = pending.aside, pending.position.step
        assert pending.metadata is not None
        pending.writer.write_metadata(pending.metadata, [results for _, results, _, _ in everyone])
        (aside / COMMON).write_bytes(_record({"iteration": step}))
        save_config(CheckpointingConfig("torch_dist", 1), str(aside))
        files: dict[str, FileFacts] = {name: facts for part in everyone for name, facts in part[0].items()}
        files |= {name: facts_of(aside / name) for name in (METADATA, COMMON, "metadata.json")}
        manifest = Manifest(
            step=step,
            consumed_samples=pending.position.consumed_samples,
            layout=self._layout,
            config=to_dict(self.config),
            optimizer=pending.counters,
            code=code_identity(),
            files=files,
            seconds=max(seconds for _, _, seconds, _ in everyone),
            data=self._data,
        )
        manifest.write(aside)
        folder = folders.publish(aside, unsynced=(COMMON, "metadata.json"))
        folders.Retention(self.options.keep_last, self.options.keep_every).apply(pending.run, step)
        logger.debug("%s: %d bytes written in %.1f s", folder, manifest.bytes, manifest.seconds)
        return folder

    def _on_first(self, action: Callable[[], Answer], place: Path, lost: str | None = None) -> Answer:
        """Run `action` on process 0; everyone gets its answer, or its error as a UserError that says what is lost."""
        outcome: list[Any] = [None, None, None]
        try:
            if self.ranks.world == 0:
                outcome[0] = action()
        except OSError as error:
            outcome[1] = self._explain(error, place, lost)
        except UserError as error:
            outcome[1] = str(error)
        except Exception as error:
            outcome[2] = repr(error)
            raise
        finally:
            if any(outcome[1:]) and place.name.endswith(folders.UNFINISHED):
                shutil.rmtree(place, ignore_errors=True)  # frees its space
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise UserError(outcome[1])
        if outcome[2] is not None:
            raise RuntimeError(f"process 0: {outcome[2]}")
        answer: Answer = outcome[0]
        return answer

    def _explain(self, error: OSError, place: Path, lost: str | None) -> str:
        text = f"save: {error.filename or place} cannot be written ({error.strerror or error})"
        if lost is None:
            return f"{text}; choose another folder or make this one writable"
        kept = f"{self.saved} is the newest complete one" if self.saved else "earlier checkpoints are untouched"
        return f"{text}, so {lost} is not there, {kept}; make room and start again"

    @property
    def _layout(self) -> dict[str, Any]:
        ranks = self.ranks
        return {
            "tensor": ranks.tensor_size,
            "pipeline": ranks.pipeline_size,
            "context": ranks.context_size,
            "data": ranks.data_size,
            "device": torch.device(_device()).type,
        }

    def _sharded_state(self, randomness: bool) -> dict[str, Any]:
        state: dict[str, Any] = {f"model{number}": _weights(chunk) for number, chunk in enumerate(unwrap(self.model))}
        state["optimizer"] = self.optimizer.sharded(state)
        if randomness:
            state["random_states"] = random_states.sharded(self.ranks)
        return state

    def _log(self, text: str) -> None:
        if self.ranks.world == 0:
            logger.info(text)


def _record(value: Any) -> bytes:
    """As torch.save writes it, which itself says nothing of the file when it fails."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _device() -> Any:
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def _weights(chunk: PackedGPT) -> dict[str, Any]:
    """A chunk's sharded tensors; Transformer Engine's objects, pickles that only fp8 needs, are left out."""
    sharded = chunk.sharded_state_dict()
    return {name: value for name, value in sharded.items() if not isinstance(value, ShardedObject)}


def _set_weights(chunk: PackedGPT, state: dict[str, Any]) -> None:
    missing, unexpected = chunk.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    assert not missing, missing
    assert not unexpected, unexpected
