"""The time that steps of two processes would take with a core each, measured on a machine that is busy with other work.

    torchrun --nproc-per-node 2 benchmarks/own_cores.py FOLDER [flags of pretrain_skyladder.py]

trains, and notes in FOLDER each process's CPU seconds whenever it sends, receives, meets the others in a collective, or
waits for one of these. `step_seconds` puts both records together again: a process goes on after a wait when what it
waits for is there, as in a run in which CPU seconds are the only ones. What it leaves out is the bytes' way from
process to process. A send ends when its receive has been posted, as gloo's and NCCL's do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

MEETINGS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "barrier",
)
events: list[tuple[str, int, float]] = []
counts = {"send": 0, "receive": 0, "meet": 0}


def note(kind: str, number: int) -> None:
    events.append((kind, number, time.process_time()))


class Waited:
    """Stands for a piece of work, and notes when it is waited for."""

    def __init__(self, work: Any, kind: str, number: int) -> None:
        self._work, self._kind, self._number = work, kind, number

    def wait(self, *given: Any, **named: Any) -> Any:
        note(f"wait {self._kind}", self._number)
        result = self._work.wait(*given, **named)
        note("go on", 0)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def noted(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        group = named.get("group", next((one for one in given if isinstance(one, dist.ProcessGroup)), None))
        if dist.get_world_size(group) == 1:
            return function(*given, **named)
        number = counts[kind]
        counts[kind] += 1
        note(kind, number)
        if kind == "meet" and not named.get("async_op", False):
            note("wait meet", number)
            function(*given, **named)
            note("go on", 0)
            return None
        return Waited(function(*given, **named), kind, number)

    return call


def train(folder: Path, flags: list[str]) -> int:
    for names, kind in ((["isend"], "send"), (["irecv"], "receive"), (MEETINGS, "meet")):
        for name in names:
            replaced = noted(getattr(distributed_c10d, name), kind)
            for module in (dist, distributed_c10d):
                setattr(module, name, replaced)

    from megatron_ext.engine.step import Stepper
    from pretrain_skyladder import main

    plain = Stepper.launch

    def timed(self: Stepper, *given: Any, **named: Any) -> Any:
        note("step begins", 0)
        result = plain(self, *given, **named)
        note("step ends", 0)
        return result

    Stepper.launch = timed  # type: ignore[method-assign]
    status = main(flags)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(events))
    return status


def step_seconds(folder: Path) -> list[float]:
    """Return the seconds of each step, had each process a core of its own."""
    logs = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    place, behind = [0, 0], [0.0, 0.0]  # event that comes next; what waiting has added to the process's CPU seconds
    seen: list[dict[tuple[str, int], float]] = [{}, {}]  # when each was sent, posted or met
    needed = {"wait send": "receive", "wait receive": "send", "wait meet": "meet"}
    begins: list[list[float]] = [[], []]
    ends: list[list[float]] = [[], []]
    while any(place[rank] < len(logs[rank]) for rank in range(2)):
        moved = False
        for rank in range(2):
            while place[rank] < len(logs[rank]):
                kind, number, cpu = logs[rank][place[rank]]
                if kind in needed:
                    there = seen[1 - rank].get((needed[kind], number))
                    if there is None:
                        break
                    behind[rank] = max(behind[rank], there - cpu)
                elif kind in counts:
                    seen[rank][kind, number] = cpu + behind[rank]
                elif kind == "step begins":
                    begins[rank].append(cpu + behind[rank])
                elif kind == "step ends":
                    ends[rank].append(cpu + behind[rank])
                place[rank], moved = place[rank] + 1, True
        assert moved, "the processes wait for each other"
    return [
        max(last) - max(first) for first, last in zip(zip(*begins, strict=True), zip(*ends, strict=True), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), sys.argv[2:]))
