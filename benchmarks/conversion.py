"""Measure memory and time of the libraries that could convert checkpoints, beside our own readers and writers.

python benchmarks/conversion.py [--tensors 16]

Each way runs in a process of its own on tensors of 16 MiB, which an export takes as one file. Growth is that of the
process's peak memory (VmHWM) over the work itself; imports are done before.

    write   a safetensors file: safetensors.torch.save_file, torch's HuggingFaceStorageWriter, ours
    read    one stored tensor of that size whole: torch's DCP, ours; and as 24 runs of rows (q, k, v of 8 groups)
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ext.checkpoint.formats import torch_dist_writer
from megatron_ext.checkpoint.formats.safetensors_writer import TensorPlan, write_file
from megatron_ext.checkpoint.formats.torch_dist import TorchDistTensors

ROWS, COLUMNS = 4096, 1024
STORED = "stored"


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def tensor() -> Tensor:
    return torch.ones(ROWS, COLUMNS)


def write_with_safetensors(folder: Path, count: int) -> None:
    save_file({f"t{n}": tensor() for n in range(count)}, folder / "model.safetensors")


class Late(DefaultSavePlanner):
    """Makes each tensor when torch comes to write it: what a planner can do to save memory."""

    def resolve_data(self, write_item: object) -> Tensor:
        return tensor()


def write_with_torch(folder: Path, count: int) -> None:
    names = {f"t{n}": 1 for n in range(count)}
    state = {name: torch.empty(1).expand(ROWS, COLUMNS) for name in names}  # shapes alone
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), names), planner=Late(), no_dist=True)


def write_with_ours(folder: Path, count: int) -> None:
    plans = [TensorPlan(f"t{n}", (ROWS, COLUMNS), torch.float32) for n in range(count)]

    def blocks() -> Iterator[Tensor]:
        return (torch.ones(ROWS // 2, COLUMNS) for _ in range(2))

    write_file(folder / "model.safetensors", plans, ((plan, blocks()) for plan in plans))


def read_with_torch(folder: Path, count: int) -> None:
    dcp.load({STORED: torch.empty(count * ROWS, COLUMNS)}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def read_with_ours(folder: Path, count: int) -> None:
    for rows in TorchDistTensors(folder).rows(STORED, (), 0, count * ROWS):
        rows.sum()


def read_runs_with_torch(folder: Path, count: int) -> None:
    """Read as a planner asks the reader: one request for each run of rows."""
    rows = count * ROWS // 24
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)

    class Planner(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: object) -> Tensor:
            return torch.empty(rows, COLUMNS)

        def commit_tensor(self, read_item: object, tensor: Tensor) -> None: ...

    for run in range(24):
        chunk = ChunkStorageMetadata(torch.Size([run * rows, 0]), torch.Size([rows, COLUMNS]))
        items = create_read_items_for_chunk_list(STORED, metadata.state_dict_metadata[STORED], [chunk])
        reader.read_data(dcp.LoadPlan(items), Planner())


def read_runs_with_ours(folder: Path, count: int) -> None:
    rows, tensors = count * ROWS // 24, TorchDistTensors(folder)
    for run in range(24):
        for part in tensors.rows(STORED, (), run * rows, (run + 1) * rows):
            part.sum()


WAYS: dict[str, Callable[[Path, int], None]] = {
    "write, safetensors": write_with_safetensors,
    "write, torch": write_with_torch,
    "write, ours": write_with_ours,
    "read, torch": read_with_torch,
    "read, ours": read_with_ours,
    "read 24 runs, torch": read_runs_with_torch,
    "read 24 runs, ours": read_runs_with_ours,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=16, help="of 16 MiB each [16]")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        warnings.simplefilter("ignore")
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        before, began = peak_bytes(), time.perf_counter()
        WAYS[options.way](options.folder, options.tensors)
        seconds = time.perf_counter() - began
        print(f"{options.way:<22} {(peak_bytes() - before) / 2**20:7.0f} MiB {seconds:7.2f} s")
        return
    print(f"{options.tensors * 16} MiB            growth of the peak     time", flush=True)
    with tempfile.TemporaryDirectory() as name:
        torch_dist_writer.BLOCK_BYTES = 2**62  # one block, as the process of a run writes it that holds a whole tensor
        shape = (options.tensors * ROWS, COLUMNS)
        layer = torch_dist_writer.Layer(STORED, shape, torch.float32, (), (), lambda first, last: torch.ones(shape))
        torch_dist_writer.write_checkpoint(Path(name), [layer])
        for way in WAYS:
            own = ["--way", way, "--folder", name, "--tensors", str(options.tensors)]
            subprocess.run([sys.executable, __file__, *own], check=True)


if __name__ == "__main__":
    main()
