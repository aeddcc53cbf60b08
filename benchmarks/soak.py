"""Train for hours under continuous faults: python benchmarks/soak.py --hours 2 --output FOLDER

Two ranks on a CPU train a tiny model. Whenever they have ended, both are started again with --load, as Slurm does after
a requeue (tests/slurm has real Slurm jobs). For half of the time these faults are injected into ranks repeatedly, in an
order determined by the seed:

    kill    SIGKILL
    stop    SIGSTOP, forever: detected by the watchdog of the other rank
    hang    the main thread stops making progress: detected by the watchdogs of both
    slow    each fsync takes half a second longer, while two checkpoints are written
    full    no file may exceed a size limit (RLIMIT_FSIZE): a checkpoint or a line of metrics cannot be written
    warn    SIGUSR1, Slurm's warning before the time limit

Then the same run is repeated without faults, to the same step: metrics.jsonl of both must be equal, value by value,
except for times; and the memory of its processes must be constant. FOLDER receives soak.jsonl (the result and all
faults) and the runs.
"""

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
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
from record import ROOT, Records, parser_of

from megatron_ext.files.jsonl import read_jsonl

RANKS = 2
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "hang": signal.SIGUSR2, "warn": signal.SIGUSR1}
KINDS = ("kill", "stop", "hang", "slow", "full", "warn")
# what a rank's error says after a fault
MESSAGES = {"kill": "gloo", "stop": "made no progress", "hang": "made no progress", "full": "File too large"}
WATCHDOG_S = 15
GRACE_S = 15
FOUND_S = WATCHDOG_S + 25 + GRACE_S + 25  # maximum time from a fault to the end of both ranks, on a busy machine
FLAT = 0.02
FSYNC_DELAY_S = 0.5
MODEL = "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --num-query-groups 2"
ROWS = "--seq-length 64 --window-start 8 --train-iters 1000000 --save-interval 40 --keep-last 2 --no-tensorboard"
TIMES = re.compile("time|.*_s|mfu|peak_memory_bytes")  # values that differ between runs


def rank(flags: list[str]) -> int:
    """Train as a rank does: SIGUSR2 makes it hang, and while the file $SLOW_DISK exists, each fsync is slow."""
    sys.path.insert(0, str(ROOT))
    from pretrain_skyladder import main as pretrain

    fsync = os.fsync

    def hang(*_: object) -> NoReturn:
        while True:
            time.sleep(3600)

    def slow_fsync(descriptor: int) -> None:
        if Path(os.environ["SLOW_DISK"]).exists():
            time.sleep(FSYNC_DELAY_S)
        fsync(descriptor)

    signal.signal(signal.SIGUSR2, hang)
    os.fsync = slow_fsync
    return int(pretrain(flags))


class FailedError(Exception):
    """Raised if the run does not behave as expected."""


@dataclass
class Job:
    """A run of two ranks in `folder`; callers must call `status` often."""

    folder: Path
    flags: tuple[str, ...] = ()  # besides the flags of every run
    starts: int = 0
    ranks: list[psutil.Popen] = field(default_factory=list)
    first_end: float | None = None

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.run = self.folder / "run"
        self.slow = self.folder / "slow"
        self.log = self.folder / "ranks.log"

    def start(self) -> None:
        """Start the ranks, or start them again."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        common |= {"OMP_NUM_THREADS": "1", "SLOW_DISK": str(self.slow)}
        flags = f"--config examples/configs/cpu_smoke.yaml {MODEL} {ROWS} --watchdog-timeout {WATCHDOG_S}".split()
        command = [sys.executable, __file__, "rank", *flags, *self.flags]
        command += ["--save", str(self.run), "--load", str(self.run), "--load-if-present"]
        self.starts += 1
        self.ranks = []
        self.first_end = None
        for number in range(RANKS):
            environment = os.environ | common | {"RANK": str(number), "LOCAL_RANK": str(number)}
            with self.log.open("ab") as log:
                self.ranks.append(psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))

    def status(self) -> int | None:
        """Return the largest exit status of the ranks, None while one runs; one runs at most GRACE_S alone."""
        time.sleep(0.1)
        statuses = [rank.poll() for rank in self.ranks]
        if None not in statuses:
            return max(128 - status if status < 0 else status for status in statuses)
        if statuses != [None] * RANKS:
            self.first_end = self.first_end or time.monotonic()
            if time.monotonic() - self.first_end > GRACE_S:
                self.kill()
        return None

    def saved(self) -> int:
        """Return the step of the newest checkpoint, 0 without one."""
        pointer = self.run / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(pointer.read_text()) if pointer.exists() else 0

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 600) -> None:
        """Wait for a condition; raise `FailedError` if the job ends, or does not reach it in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            status = self.status()
            if status is not None or time.monotonic() > deadline:
                raise FailedError(f"waiting for {what}: " + ("too long" if status is None else f"ended with {status}"))

    def wait_for_checkpoint(self) -> None:
        before = self.saved()
        self.wait_for(lambda: self.saved() != before, "a new checkpoint")

    def kill(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        psutil.wait_procs(self.ranks, timeout=30)


def inject(job: Job, kind: str, number: int) -> int | None:
    """Inject a fault into a rank, and return the status with which the job ends; None if it goes on."""
    if kind == "slow":
        job.slow.touch()
        job.wait_for_checkpoint()
        job.wait_for_checkpoint()
        job.slow.unlink()
        return None
    if kind == "full":
        largest = max(path.stat().st_size for path in job.run.glob("checkpoints/iter_*/*.safetensors"))
        bound = max((job.run / "metrics.jsonl").stat().st_size + 20_000, largest // 2)
        for rank in job.ranks:
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (bound, resource.RLIM_INFINITY))
    else:
        job.ranks[number].send_signal(SIGNALS[kind])
    deadline = time.monotonic() + FOUND_S
    while time.monotonic() < deadline:
        status = job.status()
        if status is not None:
            return status
    raise FailedError(f"{kind}: the ranks have not ended after {FOUND_S} s")


def train_with_faults(job: Job, seconds: float, every_s: float, chance: random.Random) -> list[dict[str, Any]]:
    """Train for some time with faults, and stop with a warning; return the faults."""
    began = time.monotonic()
    faults = list[dict[str, Any]]()
    queue = list[str]()
    job.start()
    while True:
        ending = time.monotonic() - began > seconds
        job.wait_for_checkpoint()
        until = time.monotonic() + chance.uniform(0, 2 * every_s)
        job.wait_for(lambda until=until: time.monotonic() > until, "the next fault")  # type: ignore[misc]
        queue = queue or chance.sample(KINDS, len(KINDS))
        kind = "warn" if ending else queue.pop()
        number = chance.randrange(RANKS)
        fault = {"fault": kind, "rank": number, "saved": job.saved(), "at_s": round(time.monotonic() - began, 1)}
        before = job.log.stat().st_size
        start = time.monotonic()
        status = inject(job, kind, number)
        written = job.log.read_bytes()[before:].decode(errors="replace").splitlines()
        errors = [line for line in written if re.match(r"error: |\w+Error: ", line)]
        fault |= {"took_s": round(time.monotonic() - start, 1), "status": status, "errors": errors}
        faults.append(fault)
        print(json.dumps(fault), flush=True)
        if kind in MESSAGES and not any(MESSAGES[kind] in line for line in errors):
            raise FailedError(f"{kind}: no line says {MESSAGES[kind]!r}: {errors}")
        if ending:
            return faults
        if status is not None:
            job.start()


def train_again(job: Job, steps: int, timeout_s: float) -> list[float]:
    """Train for at least `steps` steps without faults; return each rank's relative memory growth: 0.01 is 1 %.

    It is the growth of the median from the second to the last quarter of the time after the first checkpoint.
    """
    resident: list[list[int]] = []

    def far_enough() -> bool:
        saved = job.saved()
        if saved:
            resident.append([rank.memory_info().rss for rank in job.ranks])
        return saved >= steps

    job.start()
    job.wait_for(far_enough, f"{steps} steps", timeout_s)
    job.kill()
    quarter = len(resident) // 4
    if not quarter:
        raise FailedError(f"memory was looked at {len(resident)} times only; give it more time")
    early = resident[quarter : 2 * quarter]
    late = resident[3 * quarter :]
    medians = ([statistics.median(rank) for rank in zip(*part, strict=True)] for part in (early, late))
    return [round(after / before - 1, 4) for before, after in zip(*medians, strict=True)]


def differences(disturbed: Path, whole: Path) -> list[str]:
    """Describe how the steps of the disturbed run differ from the undisturbed one's, except for times."""
    records, expected = (read_jsonl(run / "metrics.jsonl") for run in (disturbed, whole))
    expected = expected[: len(records)]
    numbers = [record["step"] for record in records]
    if numbers != list(range(len(records))) or len(expected) != len(records):
        return [f"{len(records)} records of {len(set(numbers))} steps, beside {len(expected)}"]
    return [
        f"step {record['step']}: {name} is {record.get(name)}, not {expected_record.get(name)}"
        for record, expected_record in zip(records, expected, strict=True)
        for name in sorted(record.keys() | expected_record.keys())
        if not TIMES.fullmatch(name) and record.get(name) != expected_record.get(name)
    ]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--hours", type=float, default=2.0, help="of both runs together, about [2]")
    parser.add_argument("--every", type=float, default=30.0, metavar="S", help="mean seconds before a fault [30]")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.output is None:
        parser.error("--output FOLDER is required")
    folder = options.output.resolve()
    share = options.hours * 3600 / 2
    disturbed, whole = (Job(folder / name) for name in ("disturbed", "whole"))
    (folder / "soak.jsonl").unlink(missing_ok=True)
    records = Records("soak", folder / "soak.jsonl")
    facts: dict[str, Any] = {"hours": options.hours, "seed": options.seed}
    try:
        faults = train_with_faults(disturbed, share, options.every, random.Random(options.seed))
        steps = len(read_jsonl(disturbed.run / "metrics.jsonl"))
        grown = train_again(whole, steps, 2 * share + 300)
        apart = differences(disturbed.run, whole.run)
        counts = {kind: sum(fault["fault"] == kind for fault in faults) for kind in KINDS}
        facts |= {"steps": steps, "starts": disturbed.starts, "faults": counts}
        facts |= {"values_apart": len(apart), "first_apart": apart[:3], "memory_growth": grown}
        facts["longest_end_s"] = max(fault["took_s"] for fault in faults if fault["fault"] != "slow")
        records.add(**facts, ok=not apart and max(grown) <= FLAT, log=faults)
    except (FailedError, psutil.NoSuchProcess) as error:
        records.add(**facts, ok=False, error=str(error))
    finally:
        disturbed.kill()
        whole.kill()
    return int(records.failed > 0)


if __name__ == "__main__":
    sys.exit(rank(sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main())
