"""The time that steps of some processes would take with a core each, measured on a machine with fewer, or a busy one.

    torchrun --nproc-per-node 4 benchmarks/own_cores.py FOLDER [flags of pretrain_skyladder.py]

trains, and notes in FOLDER each process's CPU seconds whenever it sends, receives, meets others in a collective, or
waits for one of these. `step_seconds` puts the records together again: a process goes on after a wait when what it
waits for is there, as in a run in which CPU seconds are the only ones. What it leaves out is the bytes' way from
process to process. A send ends when its receive has been posted, as gloo's and NCCL's do.

An event is a kind, who takes part and the how manieth between these it is, and CPU seconds: of a message the sender and
the receiver, of a collective its group.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
Who = tuple[int, ...]
events: list[tuple[str, Who, int, float]] = []
counts: Counter[tuple[str, Who]] = Counter()


def note(kind: str, who: Who = (), number: int = 0) -> None:
    events.append((kind, who, number, time.process_time()))


class Waited:
    """Stands for a piece of work, and notes when it is waited for."""

    def __init__(self, work: Any, kind: str, who: Who, number: int) -> None:
        self._work, self._noted = work, (f"wait {kind}", who, number)

    def wait(self, *given: Any, **named: Any) -> Any:
        note(*self._noted)
        result = self._work.wait(*given, **named)
        note("go on")
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def parties(kind: str, named: dict[str, Any]) -> Who:
    """Say who takes part in a call with these arguments: sender and receiver, or a group."""
    group = named["group"]
    if kind == "meet":
        return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    end = "dst" if kind == "send" else "src"
    other = named[end]
    if other is None:
        other = dist.get_global_rank(group or dist.group.WORLD, named[f"group_{end}"])
    return (dist.get_rank(), other) if kind == "send" else (other, dist.get_rank())


def noted(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        who = parties(kind, bound.arguments)
        if len(who) == 1:
            return function(*given, **named)
        number = counts[kind, who]
        counts[kind, who] += 1
        note(kind, who, number)
        if kind == "meet" and not bound.arguments["async_op"]:
            note("wait meet", who, number)
            function(*given, **named)
            note("go on")
            return None
        return Waited(function(*given, **named), kind, who, number)

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
        note("step begins")
        result = plain(self, *given, **named)
        note("step ends")
        return result

    Stepper.launch = timed  # type: ignore[method-assign]
    status = main(flags)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(events))
    return status


def step_seconds(folder: Path, processes: int) -> list[float]:
    """Return the seconds of each step, had each of the processes a core of its own."""
    ranks = range(processes)
    logs = [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]
    place, behind = [0] * len(logs), [0.0] * len(logs)  # next event; what waiting has added to the CPU seconds
    seen: dict[tuple[str, int, Who, int], float] = {}  # when each was sent, posted or met, by which process
    begins: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    while any(place[rank] < len(logs[rank]) for rank in ranks):
        moved = False
        for rank in ranks:
            while place[rank] < len(logs[rank]):
                kind, who, number, cpu = logs[rank][place[rank]]
                if kind.startswith("wait "):
                    there = [seen.get((*one, tuple(who), number)) for one in _needed(kind, rank, who)]
                    if None in there:
                        break
                    behind[rank] = max(behind[rank], max(there) - cpu)
                elif who:
                    seen[kind, rank, tuple(who), number] = cpu + behind[rank]
                elif kind == "step begins":
                    begins[rank].append(cpu + behind[rank])
                elif kind == "step ends":
                    ends[rank].append(cpu + behind[rank])
                place[rank], moved = place[rank] + 1, True
        assert moved, "the processes wait for each other"
    return [
        max(last) - max(first) for first, last in zip(zip(*begins, strict=True), zip(*ends, strict=True), strict=True)
    ]


def _needed(kind: str, rank: int, who: Sequence[int]) -> list[tuple[str, int]]:
    """Say what a wait is for: what others do, and which of them."""
    if kind == "wait meet":
        return [("meet", one) for one in who if one != rank]
    return [("receive", who[1])] if kind == "wait send" else [("send", who[0])]


if __name__ == "__main__":
    sys.exit(train(Path(sys.argv[1]), sys.argv[2:]))
