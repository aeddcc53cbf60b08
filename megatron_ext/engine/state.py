"""Save, publish and load everything that a run needs to continue.

    RUN/checkpoints/iter_0000040/
        tensors_<rank>.safetensors   of one process: weights, optimizer state (optimizer_state.py), random states
        tensors.json                 their index (checkpoint/tensors.py)
        manifest.json                everything else (checkpoint/manifest.py), written last

A checkpoint is written into a temporary folder and renamed when complete; only then is the pointer updated
(checkpoint/folders.py). Weights and optimizer state can be loaded under any layout, random states only under the same
one.

With `async_save` a thread writes copies of the tensors. torch's own `async_save` allocates their memory anew each time:
saving 161 MB stalls training for 0.08 s with it and 0.04 s with ours (benchmarks/checkpoints.py).
"""

import logging
import math
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_ext.checkpoint import changes, folders
from megatron_ext.checkpoint.folders import Checkpoint
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors
from megatron_ext.checkpoint.manifest import Manifest, code_identity
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.tensors import Shard, Stored, Written, write, write_index
from megatron_ext.config import Config
from megatron_ext.config.arguments import to_dict
from megatron_ext.engine import agreement
from megatron_ext.engine.agreement import cannot_write, same_everywhere, together
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.optimizer import sync_params, unwrap
from megatron_ext.engine.optimizer_state import OptimizerState
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.weights import saved_weights, set_weights
from megatron_ext.errors import PERMANENT, UserError

logger = logging.getLogger(__name__)

# Writing may take hours between two collectives of a checkpoint; a process that dies is detected at once.
_PATIENCE = timedelta(days=1)
_TRACKER = "tracker."


@dataclass(frozen=True)
class Position:
    """The progress of a run: completed steps, the rows that they consumed, and JSON of the trainer's callbacks."""

    step: int
    consumed_samples: int
    trainer_state: dict[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Saves and loads the model, the optimizer, the random states and the position.

    All methods are collective and are called in this order:

        prepare, load     once, before the first step
        poll, save        after each step; with `async_save`, `save` returns when the tensors are copied, and a later
                          `poll` or `finish` raises errors of writing them
        finish            at the end

    Attributes:
        saved: the newest complete checkpoint in --save, published by this process or resumed from.
        begun: number of checkpoints begun, equal in all processes; a `status` from before the newest one began does
            not apply to it.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        config: Config,
        ranks: Ranks,
        data: Sequence[str],
    ) -> None:
        self.model = model
        self.config = config
        self.ranks = ranks
        self.options = config.checkpoint
        self.optimizer = OptimizerState(optimizer, config.training.bf16)
        self.saved: Path | None = None
        self._layout: dict[str, Any] = {
            "tensor": ranks.tensor_size,
            "pipeline": ranks.pipeline_size,
            "context": ranks.context_size,
            "data": ranks.data_size,
            "device": agreement.current_device().type,
        }
        if ranks.expert_size > 1:
            self._layout["expert"] = ranks.expert_size
        self._data = tuple(data)
        self._copies: list[Tensor] = []  # with async_save: host memory of this process's shards, in order
        self._unpin: Callable[[], object] = lambda: None
        self._writing: Future[Any] | None = None  # the complete checkpoint's folder
        self._group: Any = None  # torch types what new_group returns also for ranks outside of it
        self._folder = -1  # rank 0's descriptor of RUN/checkpoints
        self.begun = 0
        self._stalled = 0.0
        self._last_save = time.monotonic()

    def prepare(self, run: Path) -> None:
        """Raise UserError if a run folder is not writable; delete what a killed run left unfinished."""

        def open_folder() -> int:
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            folders.begin(run, 0).rmdir()
            return os.open(run / "checkpoints", os.O_RDONLY)  # while it is open, no other folder has its inode

        self._folder = agreement.run_on_rank0(open_folder, run)

    def status(self) -> tuple[bool, bool]:
        """Return whether this process is writing a checkpoint, and whether the next one is due by its clock."""
        seconds = self.options.save_seconds
        by_clock = bool(seconds) and time.monotonic() - self._last_save >= seconds
        return self._writing is not None and not self._writing.done(), by_clock

    def poll(self, step: int, *, writing: bool, by_clock: bool) -> bool:
        """Finish a checkpoint that all processes have written, and return whether the next is due after `step` steps.

        Args:
            step: completed steps.
            writing: whether any process is still writing, or has not reported its `status` since `begun` last
                changed. It must be equal on all processes, so that all raise an error in the same step.
            by_clock: whether any process reported that a checkpoint is due since the last one was begun.
        """
        if self._writing is not None and not writing:
            self.finish()
        interval = self.options.save_interval
        return by_clock or (bool(interval) and step % interval == 0)

    def save(self, run: Path, position: Position) -> None:
        """Begin the checkpoint of `position`; without `async_save` it is published on return.

        Raises:
            UserError: a file cannot be written; the message names it, and the incomplete checkpoint is removed.
        """
        self.finish()
        began = time.perf_counter()
        self._last_save = time.monotonic()

        def begin() -> Path:
            with self._explained(run, position.step), suppress(FileNotFoundError):
                if os.path.samestat(os.stat(run / "checkpoints"), os.fstat(self._folder)):
                    return folders.begin(run, position.step)
            raise UserError(
                f"save: {run} was moved or deleted, so the checkpoint of step {position.step} was not written; "
                "move it back and load it to go on"
            )

        folder = agreement.run_on_rank0(begin, run)
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        sync_params(self.model)
        shards = [shard for shard in self._shards(_random_states()) if shard.writes]
        if self.options.async_save:
            shards = self._copied(shards)
        counters = self.optimizer.counters()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the thread uses its own stream

        def write_shards() -> Written:
            with self._explained(folder, position.step):
                return write(folder, self.ranks.world, shards)

        def publish(written: list[Written]) -> None:
            if self.ranks.world > 0:
                return
            with self._explained(folder, position.step):
                Manifest(
                    step=position.step,
                    consumed_samples=position.consumed_samples,
                    trainer_state=position.trainer_state,
                    layout=self._layout,
                    config=to_dict(self.config),
                    optimizer=counters,
                    code=code_identity(),
                    files=write_index(folder, written),
                    seconds=time.perf_counter() - began,
                    data=self._data,
                ).write(folder)
                folders.publish(folder)
                folders.delete_superfluous(run, position.step, self.options.keep_last, self.options.keep_every)

        def write_together() -> Path:
            try:
                written = agreement.gather(together(write_shards, self._group), self._group)
                together(partial(publish, written), self._group)
            except BaseException:
                if self.ranks.world == 0:
                    shutil.rmtree(folder, ignore_errors=True)  # frees its space
                raise
            return folder.with_name(folders.folder_name(position.step))

        self._writing = agreement.in_thread("checkpoint writer", write_together)
        self.begun += 1
        self._stalled += time.perf_counter() - began
        if not self.options.async_save:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any; raise what `save` raises."""
        writing = self._writing
        self._writing = None
        if writing is None:
            return
        began = time.perf_counter()
        agreement.wait_for_threads(writing)
        self._stalled += time.perf_counter() - began
        self.saved = writing.result()

    def _copied(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return host copies that the next optimizer step does not change; complete after a synchronization.

        The next checkpoint reuses their memory.
        """
        kinds = [(shard.sizes, shard.dtype) for shard in shards]
        if [(copy.shape, copy.dtype) for copy in self._copies] != kinds:
            self._unpin()
            counts = [math.prod(sizes) * dtype.itemsize for sizes, dtype in kinds]
            rounded = [-(-count // 64) * 64 for count in counts]  # aligned
            pool = torch.empty(sum(rounded), dtype=torch.uint8)
            if torch.cuda.is_available():  # torch's own pinned tensors are rounded up to powers of two bytes
                cuda = torch.cuda.cudart()
                torch.cuda.check_error(cuda.cudaHostRegister(pool.data_ptr(), len(pool), 0))
                self._unpin = weakref.finalize(self, cuda.cudaHostUnregister, pool.data_ptr())
            parts = zip(pool.split(rounded), counts, kinds, strict=True)
            self._copies = [part[:count].view(dtype).view(sizes) for part, count, (sizes, dtype) in parts]
        pairs = list(zip(shards, self._copies, strict=True))
        for shard, copy in pairs:
            copy.copy_(shard.data(), non_blocking=True)
        return [Shard.of(shard.name, copy, shard.shape, shard.offset) for shard, copy in pairs]

    @contextmanager
    def _explained(self, folder: Path, step: int) -> Iterator[None]:
        """Replace a system error that the user can fix, such as a full disk, with a UserError."""
        try:
            yield
        except OSError as error:
            if error.errno not in PERMANENT:
                error.add_note(f"the checkpoint of step {step} was not written into {folder}")
                raise
            consequence = "earlier checkpoints are untouched"
            if self.saved:
                consequence = f"{self.saved} is the newest complete one"
            raise UserError(
                f"{cannot_write(error, folder)}, so the checkpoint of step {step} was not written, {consequence}; "
                "make room and start again"
            ) from None

    def take_stall(self) -> float:
        """Return the seconds for which saving has stalled training since the last call."""
        seconds = self._stalled
        self._stalled = 0.0
        return seconds

    def load(self, checkpoint: Checkpoint) -> Position:
        """Load a checkpoint into the model and the optimizer, and continue its run if it is in --save.

        Raises:
            UserError: the checkpoint is damaged, has other shapes, or has other options that `override` does not name.
        """
        options = self.options
        checkpoint = undamaged(checkpoint, content=options.verify_load, past_damaged=options.load_latest_complete)
        folder = checkpoint.folder
        manifest = checkpoint.manifest
        manifest.check_optimizer(folder, "take it as --init-from")
        for change in changes.check(manifest.config, self.config, manifest.step, folder):
            self._log(f"changed since the checkpoint: {change}")
        pairs = zip(self.config.data.parts, self._data, manifest.data, strict=False)
        changed = [part.prefix for part, now, then in pairs if now != then]
        if changed and not {"data_path", "mixture"} & set(options.override):
            raise UserError(
                f"load: {changed[0]} is not the data that {folder} was trained on: its size, beginning or end differs; "
                "restore it, or add --override data_path to go on with the new one"
            )
        same_layout = manifest.layout == self._layout
        if not same_layout:
            self._log("checkpoint of another layout: random states start anew (they matter to dropout alone)")
        self._read(checkpoint, randomness=same_layout)
        if options.save and checkpoint.run.resolve() == Path(options.save).resolve():
            self.saved = Path(options.save) / "checkpoints" / folder.name
            for later_folder in agreement.run_on_rank0(lambda: folders.rewind(folder), folder):
                self._log(f"{later_folder} is later than the resumed step and is kept aside; delete it if unneeded")
        self._log(f"continuing from {folder} after {manifest.step} steps")
        return Position(manifest.step, manifest.consumed_samples, manifest.trainer_state)

    def load_optimizer(self, pretrained: Pretrained) -> None:
        """Load the weights and the optimizer state of another run's checkpoint.

        Raises:
            UserError: the checkpoint is damaged, has other shapes or precision, or only weights.
        """
        assert pretrained.checkpoint is not None
        checkpoint = undamaged(pretrained.checkpoint)
        checkpoint.manifest.check_optimizer(checkpoint.folder, "leave --init-optimizer out")
        changes.check_shapes(checkpoint.manifest.config, self.config, checkpoint.folder)
        self._read(checkpoint, randomness=False)

    def _read(self, checkpoint: Checkpoint, *, randomness: bool) -> None:
        """Load the tensors; random states only on request, because they fit only the layout that wrote them."""
        states = {}
        if randomness:
            states = _random_states()
        shards = self._shards(states, to_load=True)
        agreement.together_in_threads("checkpoint reader", lambda: Stored(checkpoint.folder).fill(shards))
        self.optimizer.load(checkpoint.manifest.optimizer)
        if randomness:
            torch.set_rng_state(states.pop("cpu"))
            if "cuda" in states:
                torch.cuda.set_rng_state(states.pop("cuda"))
            get_cuda_rng_tracker().set_states({name.removeprefix(_TRACKER): state for name, state in states.items()})

    def _shards(self, states: dict[str, Tensor], *, to_load: bool = False) -> list[Shard]:
        """Return all shards of this process; of random states each process has one row."""
        chunks = list(unwrap(self.model))
        weights = list(saved_weights(chunks, self.config.model, self.ranks))
        shards = [shard for weight in weights for shard in weight.shards]
        shards += self.optimizer.shards(weights, to_load=to_load)
        for name, state in states.items():
            shape = self.ranks.world_size, len(state)
            shards.append(Shard.of(f"random_states.{name}", state.view(1, -1), shape, (self.ranks.world, 0)))
        return shards

    def _log(self, text: str) -> None:
        if self.ranks.world == 0:
            logger.info(text)


def load_weights(chunks: Sequence[PackedGPT], pretrained: Pretrained, ranks: Ranks) -> None:
    """Load only the weights of a Hugging Face folder or a checkpoint, under any layout. Collective.

    Raises:
        UserError: the folder or the checkpoint is damaged; the message names the tensor or the file.
    """
    if pretrained.checkpoint is None:
        source = HuggingFaceTensors(pretrained.folder)
        source.check(pretrained.model, pretrained.vocab_size)
        set_weights(chunks, pretrained.model, pretrained.vocab_size, ranks, source.open)
        return
    folder = undamaged(pretrained.checkpoint).folder
    shards = [shard for weight in saved_weights(chunks, pretrained.model, ranks) for shard in weight.shards]
    agreement.together_in_threads("checkpoint reader", lambda: Stored(folder).fill(shards, padded=True))


def undamaged(checkpoint: Checkpoint, *, content: bool = True, past_damaged: bool = False) -> Checkpoint:
    """Return the checkpoint, or with `past_damaged` and a warning the newest undamaged one up to it. Collective.

    Each process checks its share of the files; with `content` checksums are compared, not only sizes.

    Raises:
        UserError: it is damaged; the message names the file, and the newest complete checkpoint before it.
        RuntimeError: the processes see different checkpoints.
    """
    earlier = folders.older(checkpoint.folder)
    agree(checkpoint)
    while True:
        manifest = checkpoint.manifest
        share = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        try:
            together(partial(manifest.check_files, checkpoint.folder, share, content=content))
            return checkpoint
        except UserError as error:
            before = next(earlier, None)
            agree(before)
            if before is None or not past_damaged:
                raise folders.with_offer(error, before) from None
            if dist.get_rank() == 0:
                logger.warning("%s\nload_latest_complete: taking %s", error, before.folder)
            checkpoint = before


def agree(checkpoint: Checkpoint | None) -> None:
    """Raise RuntimeError unless all processes have found the same checkpoint, or none. Collective.

    Each process searches by itself, and a shared file system may show an outdated state to some nodes.
    """
    name = "none"
    if checkpoint is not None:
        name = f"{checkpoint.folder.name} (sha256 {checkpoint.manifest.digest[:8]})"
    if same_everywhere(name):
        return
    names = [name] * dist.get_world_size()
    dist.all_gather_object(names, name)
    listed = ", ".join(f"{name} on rank {names.index(name)}" for name in dict.fromkeys(names))
    raise RuntimeError(
        f"load: got {listed}, needs the same checkpoint for all; a node saw an earlier state of the file "
        "system, or another job writes there: start again"
    )


def _random_states() -> dict[str, Tensor]:
    """Return a copy of each random generator's state, uint8 [bytes]."""
    states = {_TRACKER + name: state for name, state in get_cuda_rng_tracker().get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.cpu().clone() for name, state in states.items()}
