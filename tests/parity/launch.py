"""Real runs of `pretrain_skyladder.py` with real processes, and what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.torch import load_file  # numpy's knows no bfloat16

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_skyladder.py"
CONFIG = ["--config", str(ROOT / "examples" / "configs" / "cpu_smoke.yaml"), "--no-tensorboard"]
TIMEOUT_S = 240
TIMES = {
    "step_time_s",
    "data_wait_s",
    "score_time_s",
    "tokens_per_s",
    "peak_memory_bytes",
    "save_stall_s",
}  # what differs from run to run

Weights = dict[str, np.ndarray]
Flags = Sequence[object]


class RunError(AssertionError):
    """A run ended otherwise than the test expects; the message has its stderr."""


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        folder: its --save.
        returncode, stdout, stderr: of the command; under torchrun of its agent.
    """

    folder: Path
    returncode: int
    stdout: str
    stderr: str

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return read_jsonl(self.folder / "metrics.jsonl")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluation.jsonl."""
        return read_jsonl(self.folder / "evaluation.jsonl")

    @property
    def trajectory(self) -> Path:
        """The folder of --dump-trajectory."""
        return self.folder / "trajectory"

    def weights(self, name: str) -> Weights:
        """`initial` or `final` weights as float32, by Hugging Face names."""
        loaded = load_file(self.trajectory / f"{name}.safetensors")
        return {name: tensor.float().numpy() for name, tensor in loaded.items()}

    def series(self, key: str) -> list[Any]:
        """One metric, step by step."""
        return [record[key] for record in self.metrics]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSON-lines file, [] where there is none (yet)."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def command(flags: Flags, processes: int, script: Path = SCRIPT) -> list[str]:
    """The command line of a run: torchrun for several processes, plain Python for one."""
    python = [sys.executable]
    if processes > 1:
        python += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        python += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [*python, str(script), *CONFIG, *map(str, flags)]


def start(flags: Flags, processes: int, folder: Path, script: Path = SCRIPT) -> subprocess.Popen[bytes]:
    """Start a run in a session of its own; what it says goes to `folder`.stdout and .stderr."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    with _said(folder, "stdout").open("wb") as out, _said(folder, "stderr").open("wb") as err:
        return subprocess.Popen(
            command([*flags, "--save", folder], processes, script),
            cwd=ROOT,
            env=inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], folder: Path) -> RunResult:
    """Wait for a started run, at most TIMEOUT_S; then its whole session is killed and the test fails."""
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        kill(process)
        raise RunError(f"still running after {TIMEOUT_S} s:\n{_text(folder, 'stderr')}") from None
    return RunResult(folder, process.returncode, _text(folder, "stdout"), _text(folder, "stderr"))


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the whole run at once: torchrun's agent, its workers and their checkpoint writers."""
    if process.poll() is not None:
        return
    agent = psutil.Process(process.pid)
    family = [agent, *agent.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(30)
    psutil.wait_procs(family, timeout=30)


def launch(flags: Flags, processes: int, folder: Path, script: Path = SCRIPT) -> RunResult:
    """Run the trainer to its end with --save `folder` and --dump-trajectory `folder`/trajectory.

    Raises:
        RunError: it did not exit with 0; the message has its stderr.
    """
    result = attempt([*flags, "--dump-trajectory", folder / "trajectory"], processes, folder, script)
    if result.returncode:
        raise RunError(f"exit {result.returncode} of {flags} on {processes} processes:\n{result.stderr[-6000:]}")
    return result


def attempt(flags: Flags, processes: int, folder: Path, script: Path = SCRIPT) -> RunResult:
    """Run the trainer, whatever comes of it."""
    return finish(start(flags, processes, folder, script), folder)


def without_times(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must not differ between two runs of the same."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """max |a - b| / |b| over two series of the same length."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def weight_error(ours: Weights, theirs: Weights) -> tuple[float, str]:
    """The worst max|a-b| / max|b| of all tensors, and its name.

    A bias starts at zero and hardly moves, the keys' with gradients that nearly cancel: Adam makes steps of
    their rounding. Its differences are therefore measured by the matrix beside it (fp32 itself is 1e-4 off
    fp64 otherwise); one that is not reduced over its ranks would still be 1e-3 off.
    """
    assert ours.keys() == theirs.keys()
    return max((_error(ours[name], theirs[name], _scale(theirs, name)), name) for name in theirs)


def _scale(weights: Weights, name: str) -> float:
    beside = weights.get(name.removesuffix("bias") + "weight", weights[name])
    return float(max(np.abs(weights[name]).max(), np.abs(beside).max()))


def _error(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max() / scale)


def _said(folder: Path, stream: str) -> Path:
    return folder.with_name(f"{folder.name}.{stream}")


def _text(folder: Path, stream: str) -> str:
    return _said(folder, stream).read_text(errors="replace")
