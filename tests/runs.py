"""Whole runs of `pretrain_skyladder.py`, what they left behind, and how far two of them are apart."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file  # numpy's knows no bfloat16

from tests.launcher import FORK_SERVER, ROOT, TIMEOUT_S, Agent, Commands, Done, torchrun

TRAINER = "pretrain_skyladder.py"
CONFIG = ["--config", str(ROOT / "examples" / "configs" / "cpu_smoke.yaml"), "--no-tensorboard"]
TIMES = re.compile("time|.*_s|mfu|peak_memory_bytes")  # what differs from run to run

Weights = dict[str, np.ndarray]
Flags = Sequence[object]


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
        return read_jsonl(self.folder / "metrics.jsonl")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / "evaluation.jsonl")

    @property
    def trajectory(self) -> Path:
        return self.folder / "trajectory"

    def weights(self, name: str) -> Weights:
        """`initial` or `final` weights as float32, by Hugging Face names."""
        loaded = load_file(self.trajectory / f"{name}.safetensors")
        return {name: tensor.float().numpy() for name, tensor in loaded.items()}

    def series(self, key: str) -> list[Any]:
        return [record[key] for record in self.metrics]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSON-lines file, [] where there is none (yet)."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def launch(flags: Flags, processes: int, folder: Path, server: str = FORK_SERVER) -> RunResult:
    """Run the trainer to its good end with --save `folder` and --dump-trajectory `folder`/trajectory."""
    dump = ["--save", folder, "--dump-trajectory", folder / "trajectory"]
    running = Commands(processes, server=server).start(TRAINER, *CONFIG, *flags, *dump)
    done = running.finish(TIMEOUT_S)
    assert running.statuses == [0] * processes, f"{flags} on {processes} processes:\n{running.words()}"
    return RunResult(folder, 0, done[0].stdout, done[0].stderr)


class Launched:
    """Runs on one data set, each launched once."""

    def __init__(self, data: Flags, folder: Path, server: str = FORK_SERVER) -> None:
        self._data, self._folder, self._server = data, folder, server
        self._made: dict[tuple[object, ...], RunResult] = {}

    def __call__(self, flags: Flags, processes: int) -> RunResult:
        key = (processes, *map(str, flags))
        if key not in self._made:
            folder = self._folder / f"run{len(self._made)}"
            self._made[key] = launch([*self._data, *flags], processes, folder, self._server)
        return self._made[key]


def attempt(flags: Flags, processes: int, folder: Path, script: str = TRAINER) -> RunResult:
    """Run the trainer with --save `folder` as a user does, under torchrun, whatever comes of it."""
    return finish(start(flags, processes, folder, script), folder)


def start(flags: Flags, processes: int, folder: Path, script: str = TRAINER) -> Agent:
    """Begin the trainer with --save `folder` as a user does, under torchrun."""
    return torchrun(processes, script, *CONFIG, *flags, "--save", folder)


def finish(running: Agent, folder: Path) -> RunResult:
    """Wait for a started run, at most TIMEOUT_S; then all of it is killed and the test fails."""
    (done,) = running.finish(TIMEOUT_S)
    assert done.status is not None, running.words()
    return RunResult(folder, done.status, done.stdout, done.stderr)


def refusal(done: Done) -> str:
    """The one line with which a command refused its input."""
    assert done.status == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def refusal_of_all(processes: Sequence[Done]) -> str:
    """The one line with which all processes refused their input: the first one prints it."""
    first, *later_ranks = processes
    assert [(done.status, done.stderr.count("error: ")) for done in later_ranks] == [(2, 0)] * len(later_ranks)
    return refusal(first)


def refused_command(commands: Commands, script: str, *flags: object) -> str:
    """The one line with which a command of one process refused its input."""
    return refusal(commands.attempt(script, *flags)[0])


def series(run: Path, key: str) -> list[Any]:
    """A metric of each step."""
    return [record[key] for record in read_jsonl(run / "metrics.jsonl")]


def without_times(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what must not differ between two runs of the same."""
    return [{key: value for key, value in record.items() if not TIMES.fullmatch(key)} for record in records]


def relative(ours: Sequence[Any], theirs: Sequence[Any], least: float = 0.0) -> float:
    """max |a - b| / max(|b|, least) over two series of the same length; 0 where both are 0."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert np.isfinite(a).all(), ours
    apart = np.abs(a - b)
    size = np.maximum(np.abs(b), least)
    return float(np.max(np.divide(apart, size, out=np.where(apart == 0, 0.0, np.inf), where=size != 0), initial=0.0))


def weight_error(ours: Weights, theirs: Weights) -> tuple[float, str]:
    """The worst max|a-b| / max|b| of all tensors, and its name.

    A bias starts at zero and hardly moves, the keys' with gradients that nearly cancel: Adam makes steps of
    their rounding. Its differences are therefore measured by the matrix beside it (fp32 itself is 1e-4 off
    fp64 otherwise); one that is not reduced over its ranks would still be 1e-3 off.
    """
    assert ours.keys() == theirs.keys()
    return max((_error(ours[name], theirs[name], _scale(theirs, name)), name) for name in theirs)


def _scale(weights: Weights, name: str) -> float:
    matrix = name.removesuffix("bias") + "weight"
    if name == "lm_head.bias" and matrix not in weights:  # tied
        matrix = "model.embed_tokens.weight"
    beside = weights.get(matrix, weights[name])
    least = 1.0 if name.endswith("norm.weight") else 0.0  # Gemma's norms multiply by 1 more than their weight
    return float(max(np.abs(weights[name]).max(), np.abs(beside).max(), least))


def _error(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    gap = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
    return gap / scale if scale else gap  # of initial zeros; NaN would hide all others from max()
