"""Save, publish and load all that a run continues from: a checkpoint, complete or absent, of Megatron's torch_dist.

    RUN/checkpoints/iter_0000040/
        __<rank>_0.distcp     tensors of one process: weights, optimizer_state.py's form, random states
        .metadata             torch's list of them
        metadata.json         says torch_dist; common.pt: the step, for Megatron's own tools
        manifest.json         everything else (checkpoint/manifest.py), written last

A checkpoint is written into a folder of another name and renamed when it is whole; only then does the pointer
name it (checkpoint/folders.py). Weights and optimizer state load under any layout, random states under the same.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import Metadata

from megatron_ext.checkpoint import changes, folders
from megatron_ext.checkpoint.damage import undamaged
from megatron_ext.checkpoint.folders import NAME_IT, Checkpoint
from megatron_ext.checkpoint.formats.metadata import COMMON, METADATA
from megatron_ext.checkpoint.formats.torch_dist_writer import STRATEGY, write_labels
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors
from megatron_ext.checkpoint.manifest import Manifest, code_identity, facts_of
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.config.arguments import to_dict
from megatron_ext.data.rows.identity import data_fingerprints
from megatron_ext.engine import fp8_state, parallel, random_states
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.optimizer import settle_parameters, unwrap
from megatron_ext.engine.optimizer_state import OptimizerState
from megatron_ext.engine.parallel import Answer, Ranks, cannot_write
from megatron_ext.engine.restricted import read_common, read_sharded
from megatron_ext.engine.weights import load_hugging_face
from megatron_ext.engine.writer import Background, HashingWriter, Staging, Written, plan
from megatron_ext.errors import REMEDIES, UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Says how far a run has come.

    Attributes:
        step: completed optimizer steps; the next one has this number.
        consumed_samples: rows that they took.
    """

    step: int
    consumed_samples: int


@dataclass
class _Pending:
    """Holds a checkpoint that is being written.

    Attributes:
        collected: process 0 knows what everyone has written, and has begun to publish it.
        publishing: on process 0, from then on.
    """

    run: Path
    aside: Path
    position: Position
    writer: HashingWriter
    writing: Background[Written]
    metadata: Metadata | None
    counters: dict[str, Any]
    collected: bool = False
    publishing: Background[Path] | None = None


class Checkpointer:
    """Saves and loads the model, the optimizer, the random states and the position.

    Every method is called by all processes together, in this order:

        prepare, load                         once, before the first step
        poll, save                            after each step; with `async_save`, `save` returns when the tensors are
                                              copied, a later `poll` begins to publish what all have written, and one
                                              that comes when it is published, or `finish`, ends it
        finish                                at the end

    Attributes:
        saved: the newest complete checkpoint in --save: published by this process, or the one that it began from.
        threads: how often threads have begun to write or to publish. It is the same in all processes, and tells which
            threads a process has spoken of: what it has said of earlier ones says nothing of those that follow.
    """

    def __init__(
        self, model: list[DistributedDataParallel], optimizer: MegatronOptimizer, config: Config, ranks: Ranks
    ) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.options = config.checkpoint
        self.optimizer = OptimizerState(optimizer, config.training.bf16)
        self.saved: Path | None = None
        self._device: Any = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self._layout = {
            "tensor": ranks.tensor_size,
            "pipeline": ranks.pipeline_size,
            "context": ranks.context_size,
            "data": ranks.data_size,
            "device": torch.device(self._device).type,
        } | ({"expert": ranks.expert_size} if ranks.expert_size > 1 else {})
        # read now: the files may be others, or gone, when the first checkpoint is written
        self._data = self._on_first(lambda: tuple(data_fingerprints(config)), Path())
        self._staging = Staging() if self.options.async_save else None
        self._pending: _Pending | None = None
        self.threads = 0
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

        self._on_first(write, run)

    def standing(self) -> tuple[bool, bool]:
        """Say whether a thread of this process is busy with a checkpoint, and whether by its clock the next is due."""
        seconds = self.options.save_seconds
        by_clock = bool(seconds) and time.monotonic() - self._last_save >= seconds
        pending = self._pending
        thread = None if pending is None else pending.publishing or pending.writing
        return thread is not None and thread.is_alive(), by_clock

    def poll(self, step: int, *, writing: bool, by_clock: bool) -> bool:
        """Go on with a checkpoint that no thread is busy with, and tell whether the next is due after `step` steps.

        Args:
            step: completed steps.
            writing: whether the thread of any process is busy, or not all have spoken (`standing`) since `threads` last
                changed; nobody waits for a thread then.
            by_clock: whether any process has said so since the last checkpoint was begun. One decides for all, here as
                in `writing`, for what follows is collective.
        """
        if self._pending is not None and not writing:
            if self._pending.collected:
                self.finish()
            else:
                self._collect(self._pending)
        interval = self.options.save_interval
        return by_clock or (bool(interval) and step % interval == 0)

    def save(self, run: Path, position: Position) -> None:
        """Begin the checkpoint of `position`; without `async_save` it is published when this returns.

        Raises:
            UserError: a file cannot be written; it is named, and nothing of this checkpoint stays.
            OSError, RuntimeError: the system has failed in another way, on process 0 and on the others.
        """
        self.finish()
        began = time.perf_counter()
        self._last_save = time.monotonic()
        lost = f"the checkpoint of step {position.step}"
        aside = self._on_first(lambda: folders.begin(run, position.step), run, lost)
        settle_parameters(self.model)
        state, _ = save_preprocess(
            self._sharded_state(randomness=True, fp8=fp8_state.has_state(self.config.training)), not self._validated
        )
        self._validated = True  # the same structure every time
        writer = HashingWriter(aside, self._staging)
        metadata = plan(state, writer)
        counters = self.optimizer.counters()
        writing = Background("checkpoint writer", writer.write)
        self.threads += 1
        self._pending = _Pending(run, aside, position, writer, writing, metadata, counters)
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
        if not pending.collected:
            self._collect(pending)
        began = time.perf_counter()

        def published() -> Path:
            assert pending.publishing is not None
            outcome = pending.publishing.outcome()
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        parallel.wait_for_threads(pending.publishing, self._device)
        lost = f"the checkpoint of step {pending.position.step}"
        self.saved = self._on_first(published, pending.aside, lost)
        self._stalled += time.perf_counter() - began

    def _collect(self, pending: _Pending) -> None:
        """Wait until all have written, tell process 0 what, and let a thread there publish it."""
        began = time.perf_counter()
        parallel.wait_for_threads(pending.writing, self._device)
        mine = pending.writing.outcome()
        everyone: list[Any] | None = [None] * self.ranks.world_size if self.ranks.world == 0 else None
        dist.gather_object(mine, everyone, dst=0)
        pending.collected = True
        self.threads += 1
        if everyone is not None:
            pending.publishing = Background("checkpoint publisher", lambda: self._publish(pending, everyone))
        self._stalled += time.perf_counter() - began

    def _publish(self, pending: _Pending, everyone: Sequence[Written | Exception]) -> Path:
        """Complete the folder on process 0, give it its name, and delete what need not stay."""
        written = []
        for outcome in everyone:
            if isinstance(outcome, Exception):
                raise outcome
            written.append(outcome)
        aside, step = pending.aside, pending.position.step
        assert pending.metadata is not None
        pending.writer.write_metadata(pending.metadata, [part.results for part in written])
        write_labels(aside, step)
        files = {name: facts for part in written for name, facts in part.files.items()}
        files |= {name: facts_of(aside / name) for name in (METADATA, COMMON, STRATEGY)}
        manifest = Manifest(
            step=step,
            consumed_samples=pending.position.consumed_samples,
            layout=self._layout,
            config=to_dict(self.config),
            optimizer=pending.counters,
            code=code_identity(),
            files=files,
            seconds=max(part.seconds for part in written),
            data=self._data,
        )
        manifest.write(aside)
        folder = folders.publish(aside, unsynced=(COMMON, STRATEGY))
        folders.Retention(self.options.keep_last, self.options.keep_every).apply(pending.run, step)
        logger.debug("%s: %d bytes written in %.1f s", folder, manifest.bytes, manifest.seconds)
        return folder

    def take_stall(self) -> float:
        """Return the seconds for which saving has held up training since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def load(self, checkpoint: Checkpoint) -> Position:
        """Read a checkpoint into the model and the optimizer, and continue its run where --save names it.

        Raises:
            UserError: it is damaged, of another shape, or of other options that `override` does not name.
        """
        options = self.options
        checkpoint = undamaged(checkpoint, content=options.verify_load, past_damaged=options.load_latest_complete)
        folder, manifest = checkpoint.folder, checkpoint.manifest
        manifest.check_optimizer(folder, "take it as --init-from")
        for change in changes.check(manifest.config, self.config, manifest.step, folder):
            self._log(f"changed since the checkpoint: {change}")
        for line in changes.moved_rows(manifest.config, self.config, manifest.consumed_samples, folder):
            self._log(line)
        self._on_first(lambda: self._check_data(checkpoint), folder)
        if read_common(folder).get("iteration") != manifest.step:
            raise UserError(f"load: {folder / COMMON} is of another step than its manifest; take another checkpoint")
        same_layout = manifest.layout == self._layout
        if not same_layout:
            self._log("checkpoint of another layout: random states start anew (they matter to dropout alone)")
        if fp8_state.has_state(self.config.training) and not fp8_state.is_saved(manifest.config, self.config):
            self._log("checkpoint without scales of fp8: their history starts anew")
        self._read(checkpoint, randomness=same_layout)
        if options.save and checkpoint.run.resolve() == Path(options.save).resolve():
            self.saved = Path(options.save) / "checkpoints" / folder.name
            for left in self._on_first(lambda: folders.rewind(folder), folder):
                self._log(f"{left} is later than the resumed step and is kept aside; delete it if unneeded")
        self._log(f"continuing from {folder} after {manifest.step} steps")
        return Position(manifest.step, manifest.consumed_samples)

    def load_optimizer(self, pretrained: Pretrained) -> None:
        """Read the weights and the optimizer's state of another run's checkpoint.

        Raises:
            UserError: a Hugging Face folder, or a checkpoint that is damaged, of another shape or precision, or of
                weights alone.
        """
        checkpoint = undamaged(pretrained.with_optimizer(), NAME_IT)
        checkpoint.manifest.check_optimizer(checkpoint.folder, "leave --init-optimizer out")
        changes.check_shapes(checkpoint.manifest.config, self.config, checkpoint.folder)
        self._read(checkpoint, randomness=False)

    def _read(self, checkpoint: Checkpoint, *, randomness: bool) -> None:
        """Read the tensors; random states only where asked, for they fit the layout that wrote them alone."""
        fp8 = fp8_state.is_saved(checkpoint.manifest.config, self.config)
        state = read_sharded(self._sharded_state(randomness=randomness, fp8=fp8), checkpoint.folder, same_shapes=True)
        for number, chunk in enumerate(unwrap(self.model)):
            _set_weights(chunk, state[f"model{number}"])
        self.optimizer.load(state["optimizer"], checkpoint.manifest.optimizer)
        if fp8:
            fp8_state.restore(list(unwrap(self.model)), state["fp8"])
        if randomness:
            random_states.restore(state["random_states"])

    def _sharded_state(self, *, randomness: bool, fp8: bool) -> dict[str, Any]:
        state: dict[str, Any] = {f"model{number}": _weights(chunk) for number, chunk in enumerate(unwrap(self.model))}
        state["optimizer"] = self.optimizer.sharded(state)
        if fp8:
            state["fp8"] = fp8_state.sharded(list(unwrap(self.model)), self.ranks)
        if randomness:
            state["random_states"] = random_states.sharded(self.ranks)
        return state

    def _check_data(self, checkpoint: Checkpoint) -> None:
        """Refuse, on process 0, other contents under the same names: nothing else would notice them."""
        if {"data_path", "mixture"} & set(self.options.override):
            return
        for part, now, then in zip(self.config.data.parts, self._data, checkpoint.manifest.data, strict=False):
            if now != then:
                raise UserError(
                    f"load: {part.prefix} is not the data that {checkpoint.folder} was trained on: its size, beginning "
                    "or end differs; restore it, or add --override data_path to go on with the new one"
                )

    def _on_first(self, action: Callable[[], Answer], path: Path, lost: str | None = None) -> Answer:
        """Run `action` as `parallel.run_on_rank0` does.

        Args:
            action: reads or writes files.
            path: what an error names that names no file itself; a folder that was being written is deleted.
            lost: what the user has not got, if it fails.

        Raises:
            UserError, RuntimeError: as `parallel.run_on_rank0` does.
        """

        def acting() -> Answer:
            try:
                return action()
            except BaseException as error:
                if path.name.endswith(folders.UNFINISHED):
                    shutil.rmtree(path, ignore_errors=True)  # frees its space
                if lost is None or not isinstance(error, OSError) or error.errno not in REMEDIES:
                    raise
                kept = f"{self.saved} is the newest complete one" if self.saved else "earlier checkpoints are untouched"
                raise UserError(
                    f"{cannot_write(error, path)}, so {lost} was not written, {kept}; make room and start again"
                ) from None

        return parallel.run_on_rank0(self.ranks, acting, path)

    def _log(self, text: str) -> None:
        if self.ranks.world == 0:
            logger.info(text)


def load_weights(chunks: Sequence[PackedGPT], pretrained: Pretrained, ranks: Ranks) -> None:
    """Read the weights alone of a Hugging Face folder or a checkpoint, under any layout; all processes call it.

    Raises:
        UserError: the folder or the checkpoint is damaged; the tensor or the file at fault is named.
    """
    if pretrained.checkpoint is None:
        assert pretrained.model.vocab_size is not None
        source = HuggingFaceTensors(pretrained.folder)
        load_hugging_face(chunks, source, pretrained.model, pretrained.model.vocab_size, ranks)
        return
    folder = undamaged(pretrained.checkpoint, NAME_IT).folder
    loaded = read_sharded({f"model{number}": _weights(chunk) for number, chunk in enumerate(chunks)}, folder)
    for number, chunk in enumerate(chunks):
        _set_weights(chunk, loaded[f"model{number}"])


def _weights(chunk: PackedGPT) -> dict[str, Any]:
    """Return a chunk's sharded tensors, without Transformer Engine's pickles: fp8_state.py has tensors instead."""
    sharded = chunk.sharded_state_dict()
    return {name: value for name, value in sharded.items() if not isinstance(value, ShardedObject)}


def _set_weights(chunk: PackedGPT, state: dict[str, Any]) -> None:
    missing, unexpected = chunk.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]  # the objects that _weights leaves out
    assert not missing, missing
    assert not unexpected, unexpected
