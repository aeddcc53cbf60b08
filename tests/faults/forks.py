"""Runs of the trainer as processes that can be killed at any moment, without importing Megatron for each.

A server process imports once and forks a child for every rank of every run; the children run the trainer's own
main() in a process group of their own. Everything else is a run's own: its processes, groups, threads and files.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Running:
    """A run that has begun: its ranks' processes and what they say."""

    pids: list[int]
    said: Path

    def kill(self) -> None:
        """SIGKILL to all ranks at once."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(30)

    def wait(self, timeout_s: float) -> bool:
        """Whether all ranks have ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while any(psutil.pid_exists(pid) for pid in self.pids):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    @property
    def status(self) -> str:
        """The ranks' exit statuses, one line each."""
        return "".join(sorted(path.read_text() for path in self.said.parent.glob(f"{self.said.name}.*.status")))


class Forks:
    """The server of forked runs.

    Args:
        trainer: module whose main() the runs call, of the repository or of its tests.
    """

    def __init__(self, trainer: str = "pretrain_skyladder") -> None:
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment = clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), trainer],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
        self._server.stdout.close()

    def start(self, said: Path, processes: int, *flags: object) -> Running:
        """Begin a run of the trainer; what rank r says is in `said`.<r>.stderr."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        for old in said.parent.glob(f"{said.name}.*.status"):
            old.unlink()
        request = {"said": str(said), "processes": processes, "port": _free_port(), "argv": [str(f) for f in flags]}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Running(json.loads(self._server.stdout.readline()), said)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve() -> None:
    import megatron_ext.run.stages  # noqa: F401

    main = importlib.import_module(sys.argv[1]).main
    gc.collect()
    gc.freeze()  # or the first collection of every child copies each page of what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits: a child that ends is gone
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pids = list(_fork(request, main))
        answers.write(json.dumps(pids) + "\n")
        answers.flush()


def _fork(request: dict, main: object) -> Iterator[int]:
    for rank in range(request["processes"]):
        pid = os.fork()
        if pid:
            yield pid
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["processes"], "MASTER_PORT": request["port"]}
        os.environ.update({name: str(value) for name, value in place.items()})
        said = f"{request['said']}.{rank}"
        output = os.open(f"{said}.stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 1
        try:
            status = main(request["argv"])  # type: ignore[operator]
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            Path(f"{said}.status").write_text(f"{status}\n")
            os._exit(status)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    _serve()
