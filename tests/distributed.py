"""Several real processes with gloo, for tests: what they return comes back, what they raise is raised here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_processes(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` spawned processes that share a gloo group.

    Args:
        function: a module's top-level function; it may return tensors, numbers, strings, and lists and dicts of them.
        world_size: processes; RANK, LOCAL_RANK and WORLD_SIZE are set as torchrun sets them.
        args: passed on; they must pickle.
        timeout_s: after this many seconds the processes are killed and the call fails.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        Exception: a rank raised; its traceback is in the text.
        TimeoutError: a rank was still running after `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_rank, (function, world_size, args, folder, timeout_s), nprocs=world_size, join=False)
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=max(deadline - time.monotonic(), 0.01), grace_period=1):
                if time.monotonic() > deadline:
                    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise TimeoutError(f"{function.__name__}: ranks {alive} still run after {timeout_s} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _rank(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    folder: str,
    timeout_s: float,
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
