"""Train for hours under continuous faults: python benchmarks/soak.py --hours 2 --output FOLDER

Two ranks on a CPU train a tiny model, started and restarted by examples/slurm/launch.sh; srun, squeue and scontrol
are stubs. For half of the time these faults are injected into ranks repeatedly, in an order determined by the seed:

    kill    SIGKILL
    stop    SIGSTOP, forever: detected by the watchdog of the other rank
    hang    the main thread stops making progress: detected by the watchdogs of both
    slow    each fsync takes half a second longer, while two checkpoints are written
    full    no file may exceed a size limit (RLIMIT_FSIZE): a checkpoint or a line of metrics cannot be written
    warn    SIGUSR1, Slurm's warning before the time limit

Then the same run is repeated without faults, to the same step: metrics.jsonl of both must be equal, value by value,
except for times; and the memory of its processes must be constant. FOLDER receives soak.jsonl (faults, memory, the
result) and the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from record import Records

from megatron_ext.monitoring import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "hang": signal.SIGUSR2, "warn": signal.SIGUSR1}
KINDS = ("kill", "stop", "hang", "slow", "full", "warn")
# what a rank's error says after a fault
MESSAGES = {"kill": "gloo", "stop": "made no progress", "hang": "made no progress", "full": "File too large"}
WATCHDOG_S, GRACE_S = 15, 15
FOUND_S = WATCHDOG_S + 25 + GRACE_S + 25  # maximum time from a fault to the end of both ranks, on a busy machine
FLAT = 0.02
MODEL = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --num-query-groups 2"
ROWS = "--seq-length 64 --window-start 8 --train-iters 1000000 --save-interval 40 --keep-last 2 --no-tensorboard"
TIMES = re.compile("time|.*_s|mfu|peak_memory_bytes")  # values that differ between runs
STAND_INS = {
    "srun": f'exec {sys.executable} {Path(__file__).resolve()} srun "$@"',
    "squeue": "echo RUNNING",
    "scontrol": 'touch "$REQUEUED"; kill $PPID  # Slurm ends the batch shell',
    "sleep": ":",
}


def srun(words: Sequence[str]) -> int:
    """Start a task for each rank, with the options that launch.sh gives srun; return the largest exit status.

    After the first task ends, the others have the seconds of --wait; the process ids are written to $PIDS.
    """
    options = [word for word in words if word.startswith("--")]
    command = list(words)[next(index for index, word in enumerate(words) if not word.startswith("--")) :]
    (wait,) = (float(word.removeprefix("--wait=")) for word in options if word.startswith("--wait="))
    tasks = []
    for rank in range(int(os.environ["SLURM_NTASKS"])):
        with Path(f"{os.environ['TASK_LOGS']}.{rank}.log").open("ab") as log:
            place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            tasks.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | place))
    Path(os.environ["PIDS"]).write_text(json.dumps([task.pid for task in tasks]))
    ended = None
    while any(task.poll() is None for task in tasks):
        if ended is None and any(task.poll() is not None for task in tasks):
            ended = time.monotonic()
        if ended is not None and time.monotonic() - ended > wait:
            for task in tasks:
                task.kill()
        time.sleep(0.05)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


class FailedError(Exception):
    """Raised if the run does not behave as expected."""


@dataclass
class Job:
    """A run under launch.sh, in `folder`; callers must call `look` often.

    Attributes:
        run: its run folder.
        starts: number of starts of launch.sh.
        memory: (seconds, start, step, MiB of each rank), by time.
    """

    folder: Path
    output: Path
    began: float
    starts: int = 0
    memory: list[tuple[float, int, int, list[float]]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def slow(self) -> Path:
        return self.folder / "slow"

    def start(self) -> None:
        """Start launch.sh again."""
        tools = self.folder / "bin"
        tools.mkdir(parents=True, exist_ok=True)
        for name, text in STAND_INS.items():
            (tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (tools / name).chmod(0o755)
        for left in ("requeued", "pids.json"):
            (self.folder / left).unlink(missing_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | {
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RUN": str(self.run),
            "SLURM_JOB_ID": "1",
            "SLURM_NTASKS": str(RANKS),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(self.starts),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GRACE_S": str(GRACE_S),
            "OMP_NUM_THREADS": "1",
            "REQUEUED": str(self.folder / "requeued"),
            "PIDS": str(self.folder / "pids.json"),
            "TASK_LOGS": str(self.folder / "rank"),
            "SLOW_DISK": str(self.slow),
        }
        command = ["python", "benchmarks/soak_rank.py", "--config", "examples/configs/cpu_smoke.yaml", *MODEL.split()]
        command += [*ROWS.split(), "--watchdog-timeout", str(WATCHDOG_S), "--save", str(self.run)]
        command += ["--load", str(self.run), "--load-if-present"]
        self.starts += 1
        with (self.folder / "launch.log").open("ab") as log:
            words = ["bash", "examples/slurm/launch.sh", *command]
            self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in order; [] if they have not started or one has ended."""
        pids = self.folder / "pids.json"
        try:
            return [psutil.Process(pid) for pid in json.loads(pids.read_text())] if pids.exists() else []
        except (psutil.NoSuchProcess, json.JSONDecodeError):
            return []

    def steps(self) -> int:
        """Count the recorded steps: the last complete line of the metrics."""
        metrics = self.run / "metrics.jsonl"
        if not metrics.exists():
            return 0
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 8192))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b'{"step":')]
        return int(json.loads(lines[-1])["step"]) + 1 if lines else 0

    def saved(self) -> str:
        """Return the step of the newest checkpoint."""
        pointer = self.run / "checkpoints" / "latest_checkpointed_iteration.txt"
        return pointer.read_text() if pointer.exists() else "none"

    def look(self) -> int | None:
        """Record the memory of the ranks; return launch.sh's exit status, None while it runs."""
        assert self.process is not None
        now = time.monotonic() - self.began
        if not self.memory or now - self.memory[-1][0] > 1:
            with contextlib.suppress(psutil.Error):
                resident = [rank.memory_info().rss / 2**20 for rank in self.ranks()]
                if len(resident) == RANKS and all(resident):  # a process that has ended has none
                    self.memory.append((now, self.starts, self.steps(), resident))
        time.sleep(0.1)
        return self.process.poll()

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 600) -> None:
        """Wait while the job runs without faults.

        Raises:
            FailedError: it ends, or does not reach the condition in time.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            status = self.look()
            if status is not None or time.monotonic() > deadline:
                raise FailedError(f"waiting for {what}: " + ("too long" if status is None else f"ended with {status}"))

    def wait_for_checkpoint(self) -> None:
        """Wait for a new checkpoint."""
        before = self.saved()
        self.wait_for(lambda: self.saved() != before, "a new checkpoint")

    def logs(self) -> list[Path]:
        """Return the ranks' logs."""
        return [self.folder / f"rank.{rank}.log" for rank in range(RANKS)]

    def error_lines(self, offsets: Sequence[int]) -> list[str]:
        """Return the error lines of all ranks' logs after these offsets: messages, and the last lines of tracebacks."""
        texts = [
            log.read_bytes()[offset:].decode(errors="replace") for log, offset in zip(self.logs(), offsets, strict=True)
        ]
        return [line for text in texts for line in text.splitlines() if re.match(r"error: |\w+Error: ", line)]

    def note(self, **facts: Any) -> None:
        """Append a line to soak.jsonl."""
        with self.output.open("a") as file:
            file.write(json.dumps({"seconds": round(time.monotonic() - self.began, 1), **facts}) + "\n")

    def kill(self) -> None:
        """Kill all processes."""
        if self.process is not None and self.process.poll() is None:
            for member in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self.process.wait()


def inject(job: Job, kind: str, rank: int) -> None:
    """Inject a fault into a rank."""
    ranks = job.ranks()
    if len(ranks) != RANKS:
        raise FailedError(f"{kind}: the ranks have ended before it")
    if kind in SIGNALS:
        ranks[rank].send_signal(SIGNALS[kind])
    elif kind == "slow":
        job.slow.touch()
    else:
        largest = max(path.stat().st_size for path in job.run.glob("checkpoints/iter_*/*.distcp"))
        bound = max((job.run / "metrics.jsonl").stat().st_size + 20_000, largest // 2)
        for one in ranks:
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (bound, resource.RLIM_INFINITY))


def problem_of(kind: str, seconds: float, status: int | None, requeued: bool, errors: Sequence[str]) -> str | None:
    """Return what is wrong with the outcome of a fault; None if it is as expected."""
    if kind == "slow":
        return None if status is None else f"a slow disk has ended the run with {status}"
    if status is None or seconds > FOUND_S:
        return f"{seconds:.0f} s to the end, needs at most {FOUND_S}"
    if kind != "warn" and not any(MESSAGES[kind] in line for line in errors):
        return f"no line says {MESSAGES[kind]!r}: {list(errors)}"
    if requeued != (kind != "full" or status != 2):
        return f"status {status}, requeued {requeued}"
    return None


def train_with_faults(job: Job, seconds: float, every_s: float, chance: random.Random) -> list[dict[str, Any]]:
    """Train for some time with faults, and stop with a warning; return the faults.

    Raises:
        FailedError: the run does not continue after a fault, or has ended without one.
    """
    faults: list[dict[str, Any]] = []
    queue: list[str] = []
    job.start()
    ending = False
    while not ending:
        ending = time.monotonic() - job.began > seconds
        job.wait_for_checkpoint()
        until = time.monotonic() + chance.uniform(0, 2 * every_s)
        job.wait_for(lambda until=until: time.monotonic() > until, "the next fault")  # type: ignore[misc]
        queue = queue or chance.sample(KINDS, len(KINDS))
        kind, rank = "warn" if ending else queue.pop(), chance.randrange(RANKS)
        step, began = job.steps(), time.monotonic()
        offsets = [log.stat().st_size if log.exists() else 0 for log in job.logs()]
        inject(job, kind, rank)
        status = None
        if kind == "slow":
            job.wait_for_checkpoint()
            job.wait_for_checkpoint()
            job.slow.unlink()
        else:
            while job.look() is None and time.monotonic() - began < 2 * FOUND_S:
                pass
            # the batch shell itself is ended by Slurm
            ended = re.findall(r"exit status (\d+) after", (job.folder / "launch.log").read_text())
            status = int(ended[-1]) if job.look() is not None and ended else None
        took, requeued = time.monotonic() - began, (job.folder / "requeued").exists()
        errors = job.error_lines(offsets)
        wrong = problem_of(kind, took, status, requeued, errors)
        fault = {"fault": kind, "rank": rank, "step": step, "took_s": round(took, 1), "status": status}
        fault |= {"requeued": requeued, "said": errors, "wrong": wrong, "at_s": round(began - job.began, 1)}
        faults.append(fault)
        job.note(**fault)
        print(f"{fault['at_s']:7.1f} s, step {step}: {kind} of rank {rank}: {wrong or 'as it should be'}", flush=True)
        if wrong is not None:
            raise FailedError(wrong)
        if status is not None and not ending:
            job.start()  # as Slurm does after a requeue, or the owner after freeing space
    return faults


def train_without_faults(job: Job, steps: int, seconds: float) -> None:
    """Train the same number of steps without faults.

    Raises:
        FailedError: it ends, or does not reach the step in time.
    """
    job.start()
    job.wait_for(lambda: job.steps() >= steps, f"{steps} steps", seconds)
    job.ranks()[0].send_signal(signal.SIGUSR1)
    while job.look() is None:
        pass


def growth(job: Job) -> list[float]:
    """Return each rank's relative memory growth from the second to the last quarter of its steps: 0.01 is 1 %."""
    training = [line for line in job.memory if line[2] > 0]
    quarter = len(training) // 4
    early, late = training[quarter : 2 * quarter], training[3 * quarter :]
    if not early:
        raise FailedError(f"memory was looked at {len(training)} times only; give it more time")
    return [
        statistics.median(line[3][rank] for line in late) / statistics.median(line[3][rank] for line in early) - 1
        for rank in range(RANKS)
    ]


def differences(disturbed: Path, whole: Path) -> list[str]:
    """Describe how the steps of the disturbed run differ from those of the undisturbed one, except for times."""
    ours, theirs = (read_jsonl(run / "metrics.jsonl") for run in (disturbed, whole))
    theirs = theirs[: len(ours)]
    numbers = [record["step"] for record in ours]
    if numbers != list(range(len(ours))) or len(theirs) != len(ours):
        return [f"{len(ours)} records of {len(set(numbers))} steps, beside {len(theirs)}"]
    return [
        f"step {a['step']}: {name} is {a.get(name)}, not {b.get(name)}"
        for a, b in zip(ours, theirs, strict=True)
        for name in sorted(a.keys() | b.keys())
        if not TIMES.fullmatch(name) and a.get(name) != b.get(name)
    ]


def main() -> int:
    """Run the soak test; return 1 if any check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="of both runs together, about [2]")
    parser.add_argument(
        "--every", type=float, default=30.0, metavar="S", help="mean seconds of training before a fault [30]"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new, or that of an earlier soak")
    options = parser.parse_args()
    folder, share = options.output.resolve(), options.hours * 3600 / 2
    for name in ("disturbed", "whole"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    (folder / "soak.jsonl").unlink(missing_ok=True)
    records, began = Records("soak", folder / "soak.jsonl"), time.monotonic()
    disturbed, whole = (Job(folder / name, folder / "soak.jsonl", began) for name in ("disturbed", "whole"))
    result: dict[str, Any] = {"hours": options.hours, "seed": options.seed, "ok": False}
    faults: list[dict[str, Any]] = []
    try:
        faults = train_with_faults(disturbed, share, options.every, random.Random(options.seed))
        steps = disturbed.steps()
        train_without_faults(whole, steps, 2 * share + 300)
        apart, grown = differences(disturbed.run, whole.run), growth(whole)
        result |= {
            "steps": steps,
            "starts": disturbed.starts,
            "faults": {kind: sum(fault["fault"] == kind for fault in faults) for kind in KINDS},
            "values_apart": len(apart),
            "first_apart": apart[:3],
            "memory_growth": [round(one, 4) for one in grown],
            "longest_end_s": max(fault["took_s"] for fault in faults if fault["fault"] != "slow"),
            "ok": not apart and max(grown) <= FLAT,
        }
    except FailedError as error:
        result["error"] = str(error)
    finally:
        disturbed.kill()
        whole.kill()
    for job, name in ((disturbed, "disturbed"), (whole, "undisturbed")):
        for at, start, step, resident in job.memory:
            job.note(at_s=round(at, 1), run=name, start=start, step=step, mib=[round(one, 1) for one in resident])
    records.add(**result)
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(srun(sys.argv[2:]) if sys.argv[1:2] == ["srun"] else main())
