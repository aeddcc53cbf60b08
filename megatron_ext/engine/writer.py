"""Write a checkpoint's tensors: planned by all processes together, written and hashed by each in a thread of its own.

    plan (collective) -> stage: copy to the host -> write, hash, fsync (no collective, any thread) -> results

Threads instead of Megatron's forked writers: they die with their process, need no helper process that a signal to
the process group would end, and their errors come back. Writing and hashing release the interpreter lock. The plan
is Megatron's, each tensor's record torch's; ours are the thread, the reused host memory and the checksum of what
passes by, for which neither writer has a place. One process that converts a model has no plan to agree on and no
tensors in memory: it writes through torch's own writer (checkpoint/formats/torch_dist_writer.py).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, Generic

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext import heartbeat
from megatron_ext.checkpoint.manifest import FileFacts
from megatron_ext.engine import compat
from megatron_ext.engine.parallel import Answer
from megatron_ext.files.aside import sync


@dataclass(frozen=True)
class Written:
    """Tells what one process has written.

    Attributes:
        files: by name; none where the process has no tensor to write.
        results: for torch's metadata.
        seconds: how long it took.
    """

    files: dict[str, FileFacts]
    results: list[WriteResult]
    seconds: float


class Staging:
    """Keeps host copies of this process's tensors, in memory that the next checkpoint uses again."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def copy(self, key: Any, tensor: Tensor) -> Tensor:
        """Return a copy that the next optimizer step does not change; it is complete after `wait`."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Return when every copy is complete."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class HashingWriter(FileSystemWriterAsync):
    """Writes this process's part of a checkpoint into one file.

    `plan` makes Megatron call `prepare_write_data`; then `write` may run in any thread. `write_metadata`, on process 0,
    comes after the `write` of all.

    Args:
        folder: exists already.
        staging: where tensors are copied before `write`; None: `write` takes them as they then are.
    """

    def __init__(self, folder: Path, staging: Staging | None) -> None:
        super().__init__(str(folder))
        self.folder, self.staging = folder, staging
        self._name = ""
        self._items: list[tuple[WriteItem, Tensor]] = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collect, and if asked copy, what this process writes."""
        self._name = f"{plan.storage_data.prefix}0.distcp"
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)  # the state holds nothing else
            tensor = tensor.detach()
            if self.staging is not None:
                tensor = self.staging.copy((item.index.fqn, tuple(item.index.offset or ())), tensor)
            self._items.append((item, tensor))
        if self.staging is not None:
            self.staging.wait()

    def write(self) -> Written:
        """Write the file and force it to disk.

        Raises:
            OSError: with the file's name.
        """
        began = time.perf_counter()
        path = self.folder / self._name
        files: dict[str, FileFacts] = {}
        results: list[WriteResult] = []
        try:
            if self._items:
                with path.open("wb") as file:
                    hashed = _HashedFile(file)
                    for item, tensor in self._items:
                        host = tensor.to("cpu").contiguous()
                        if host.untyped_storage().nbytes() != host.numel() * host.element_size():
                            host = host.clone()  # torch.save writes the whole storage behind a view
                        heartbeat.beat()
                        results.append(compat.write_tensor(self.transforms, hashed, host, item, self._name))
                sync([path])
                files[self._name] = FileFacts(hashed.size, hashed.digest.hexdigest())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        except RuntimeError as error:  # torch's record writer, whose stream failed
            cause = error.__cause__ or error.__context__
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        finally:
            self._items.clear()
        return Written(files, results, time.perf_counter() - began)

    def write_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` from the results of all processes."""
        vars(metadata).pop("all_local_plans", None)  # Megatron's, many classes that nobody reads
        FileSystemWriter.finish(self, metadata, results)


def plan(sharded_state: dict[str, Any], writer: HashingWriter) -> Metadata | None:
    """Settle who writes what and let the writer collect its part; all processes call it.

    Args:
        sharded_state: ShardedTensors alone, factories applied.
        writer: this process's.

    Returns:
        on process 0, the metadata to complete with everyone's results.
    """
    by_key: dict[str, list[ShardedTensor]] = defaultdict(list)
    for tensor in nested_values(sharded_state):
        if is_main_replica(tensor.replica_id):  # of equal copies on several processes one is written
            by_key[tensor.key].append(tensor)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (_, metadata, _), *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key), writer, None, 0, planner=planner)
    planned: Metadata | None = metadata
    return planned


class _HashedFile:
    """Passes on what is written, and takes its checksum; it cannot seek."""

    def __init__(self, file: BufferedWriter) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all of `data`, as a file does."""
        length = memoryview(data).nbytes
        self.file.write(data)
        self.digest.update(data)
        self.size += length
        return length

    def tell(self) -> int:
        """Return where the next record begins."""
        return self.size

    def flush(self) -> None:
        """Pass on what is buffered."""
        self.file.flush()

    def close(self) -> None:
        """Do nothing: each tensor's record closes its stream, and the file stays open for the next."""


class Background(threading.Thread, Generic[Answer]):
    """Works while training goes on, in a thread that the process does not wait for at its end."""

    def __init__(self, name: str, work: Callable[[], Answer]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._outcome: Answer | Exception | None = None
        self.start()

    def run(self) -> None:
        """Work; an error is kept for `outcome`."""
        try:
            self._outcome = self._work()
        except Exception as error:
            self._outcome = error

    def outcome(self) -> Answer | Exception:
        """Wait for the end and return the answer, or the error."""
        self.join()
        assert self._outcome is not None
        return self._outcome
