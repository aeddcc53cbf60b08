"""Writing a checkpoint's tensors: planned by all processes together, written and hashed by each in a thread of its own.

    plan (collective) -> stage: copy to the host -> write, hash, fsync (no collective, any thread) -> results

Threads instead of Megatron's forked writers: they die with their process, need no helper process that a signal to
the process group would end, and their errors come back. Writing and hashing release the interpreter lock.
"""

from __future__ import annotations

import hashlib
import threading
import time
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.checkpoint.manifest import FileFacts
from megatron_ext.files.aside import sync


class Staging:
    """Host copies of this process's tensors, in memory that the next checkpoint uses again."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def copy(self, key: Any, tensor: Tensor) -> Tensor:
        """A copy that the next optimizer step does not change; complete after `wait`."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Until every copy is there."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class HashingWriter(FileSystemWriterAsync):
    """Writes this process's part of a checkpoint into one file.

    Args:
        folder: exists already.
        staging: where tensors are copied before `write`; None: `write` takes them as they then are.

    Attributes:
        files: what was written, by name.
        results: for torch's metadata.
        seconds: how long `write` took.
    """

    def __init__(self, folder: Path, staging: Staging | None) -> None:
        super().__init__(str(folder))
        self.folder, self.staging = folder, staging
        self.files: dict[str, FileFacts] = {}
        self.results: list[WriteResult] = []
        self.seconds = 0.0
        self._name = ""
        self._items: list[tuple[WriteItem, Tensor]] = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Collect, and if asked copy, what this process writes; torch calls it at the end of planning."""
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

    def write(self) -> None:
        """Write the file and force it to disk.

        Raises:
            OSError: with the file's name.
        """
        began = time.perf_counter()
        path = self.folder / self._name
        try:
            if self._items:
                with path.open("wb") as file:
                    hashed = _HashedFile(file)
                    for item, tensor in self._items:
                        self.results.append(self._write_item(hashed, item, tensor))
                sync([path])
                self.files[self._name] = FileFacts(hashed.size, hashed.digest.hexdigest())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        except RuntimeError as error:  # torch's record writer, whose stream failed
            cause = error.__cause__ or error.__context__
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        finally:
            self._items.clear()
            self.seconds = time.perf_counter() - began

    def _write_item(self, file: _HashedFile, item: WriteItem, tensor: Tensor) -> WriteResult:
        host = tensor.to("cpu").contiguous()
        if host.untyped_storage().nbytes() != host.numel() * host.element_size():
            host = host.clone()  # torch.save writes the whole storage behind a view
        return _write_item(self.transforms, file, host, item, self._name, SerializationFormat.TORCH_SAVE)  # type: ignore[arg-type]

    def write_metadata(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` from the results of all processes."""
        vars(metadata).pop("all_local_plans", None)  # Megatron's, many classes that nobody reads
        FileSystemWriter.finish(self, metadata, results)


def plan(sharded_state: dict[str, Any], writer: HashingWriter) -> Metadata | None:
    """Settle who writes what and let the writer collect its part; all processes call it.

    Args:
        sharded_state: ShardedTensors alone, factories applied.

    Returns:
        on process 0, the metadata to complete with everyone's results.
    """
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    (_, metadata, _), *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key), writer, None, 0, planner=planner)
    found: Metadata | None = metadata
    return found


class _HashedFile:
    """A file that takes the checksum of what passes through; it cannot seek."""

    def __init__(self, file: BufferedWriter) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """As a file's."""
        length = memoryview(data).nbytes
        self.file.write(data)
        self.digest.update(data)
        self.size += length
        return length

    def tell(self) -> int:
        """As a file's."""
        return self.size

    def flush(self) -> None:
        """As a file's."""
        self.file.flush()

    def close(self) -> None:
        """Each tensor's record closes its stream; the file stays open for the next."""


class Background:
    """A function in a thread that the process does not wait for at its end; its error is kept."""

    def __init__(self, function: Any) -> None:
        self.error: Exception | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self.error = error

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it has ended."""
        self._thread.join()
