"""How long a checkpoint holds up training, beside torch's DCP: python -m benchmarks.peers.checkpoint

Ours are runs of the trainer as benchmarks/checkpoints.py makes them, which save every fourth step. Then a loop in plain
torch holds as many bytes, works as long between its checkpoints as ours did, and saves with DCP to the same disk.
Seconds on the clock, the median of a run's middle: the first checkpoint, which makes buffers, and the last, which is
waited for, do not count. Before an asynchronous save the one before is waited for, and that counts as stall.

    ours, plain; ours, async        `--async-save`
    DCP save; DCP async_save        torch.distributed.checkpoint, its defaults

Runs stand in turn and each kind is run as often as --rounds says: on a shared machine their spread says what a
difference is worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.peers.checkouts import heading

ROOT = Path(__file__).resolve().parents[2]
INTERVAL = 4
RUN = "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 4 --num-query-groups 4"
RUN += " --seq-length 512 --micro-batch-size 1 --global-batch-size 2"
RUN += f" --train-iters 20 --save-interval {INTERVAL} --eval-interval 0"
SAVES = 5
TENSORS = 12


def train(folder: Path, flags: list[str]) -> tuple[int, float, float]:
    """Train; return the bytes of a checkpoint, the median seconds of a step and the mean stall of a checkpoint."""
    command = [sys.executable, "pretrain_skyladder.py", "--config", "examples/configs/cpu_smoke.yaml", *RUN.split()]
    command += ["--use-distributed-optimizer", "--save", str(folder), *flags]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    manifests = [json.loads(path.read_bytes()) for path in sorted(folder.glob("checkpoints/iter_*/manifest.json"))]
    stalls = [record["save_stall_s"] for record in records if record["step"] > INTERVAL]
    size = sum(facts["size"] for facts in manifests[0]["files"].values())
    return size, statistics.median(record["step_time_s"] for record in records), sum(stalls) / len(manifests[1:-1])


def held(total: int) -> dict[str, Tensor]:
    """Hold so many bytes in float32 tensors of one size."""
    return {f"t{number}": torch.ones(total // 4 // TENSORS) for number in range(TENSORS)}


def dcp_stall(folder: Path, total: int, between: float, *, asynchronous: bool) -> float:
    """Save several times with work between, and return the median seconds that a save in the middle held it up."""
    state, stalls, running = held(total), [], None
    for number in range(SAVES):
        _work(between, state)
        began = time.perf_counter()
        if isinstance(running, Future):
            running.result()
        options: dict[str, Any] = {"checkpoint_id": folder / f"iter_{number}"}
        running = dcp.async_save(state, **options) if asynchronous else dcp.save(state, **options)
        stalls.append(time.perf_counter() - began)
    if isinstance(running, Future):
        running.result()
    return statistics.median(stalls[1:-1])


def _work(seconds: float, state: dict[str, Tensor]) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        state["t0"].add_(1)


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
    print(heading("checkpoint"), flush=True)
    stalls: dict[str, list[float]] = {}
    size = 0
    for _ in range(chosen.rounds):
        between = 0.0
        for name, flags in (("ours, plain", []), ("ours, async", ["--async-save"])):
            with tempfile.TemporaryDirectory() as folder:
                size, step, stall = train(Path(folder) / "run", flags)
            between = INTERVAL * step
            stalls.setdefault(name, []).append(stall)
        kinds: dict[str, Callable[[Path], float]] = {
            "DCP save": partial(dcp_stall, total=size, between=between, asynchronous=False),
            "DCP async_save": partial(dcp_stall, total=size, between=between, asynchronous=True),
        }
        for name, run in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                stalls.setdefault(name, []).append(run(Path(folder)))
    dist.destroy_process_group()
    print(f"{size / 1e6:.0f} MB a checkpoint\n{'':16}{'stall s, each run':32}over ours, async")
    best = statistics.median(stalls["ours, async"])
    for name, seconds in stalls.items():
        shown = ", ".join(f"{each:.3f}" for each in seconds)
        print(f"{name:16}{shown:32}{statistics.median(seconds) / best:.2f}")


if __name__ == "__main__":
    main()
