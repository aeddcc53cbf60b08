"""Processes for tests, of three kinds, each with one way to start it.

    call(function, 2, ...)             what a function returned on each rank of a gloo group
    Commands(2).run(script, ...)       a command line of ours in two processes: to its end (run: a good one; attempt:
                                       any), or begun (start) and then signalled, waited for, killed
    torchrun(2, script, ...)           the same as a user starts it: interpreters of their own, under torchrun

The first two take milliseconds to start, because their processes are forked from servers that have imported everything
(fork_server.py). The third is for tests of what a launcher does: it takes ten seconds of a core for each process.
"""

import contextlib
import itertools
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 240  # of a whole command; generous, for a busy machine
LEFT_BEHIND_S = 15  # in which processes notice that one of them is lost
FORK_SERVER = "tests.fork_server"
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.002) -> bool:
    """Wait for a condition; whether it came true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True


@dataclass(frozen=True)
class Done:
    """A process that has ended: its exit status, None where it was killed, and what it wrote."""

    status: int | None
    stdout: str
    stderr: str


class Running:
    """A command that has begun.

    Attributes:
        processes: of its ranks in order, None for one that ended at once; or torchrun's agent.
    """

    def __init__(self, processes: Sequence[psutil.Process | None], outputs: Sequence[Path]) -> None:
        self.processes = list(processes)
        self._outputs = outputs

    def signal(self, number: signal.Signals, rank: int = 0) -> None:
        process = self.processes[rank]
        assert process is not None, self.words()
        process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of all processes; whether it came within `timeout_s`."""
        return not psutil.wait_procs(filter(None, self.processes), timeout=max(timeout_s, 0))[1]

    def alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process is not None and process.is_running()]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Wait for something that the running command does.

        Raises:
            AssertionError: it ended or `timeout_s` went by before; the message has what it wrote.
        """
        wait_until(lambda: condition() or self.wait(0), timeout_s)
        if not condition():
            self.kill()
            raise AssertionError(f"ended, or {timeout_s} s gone, before what was waited for:\n{self.words()}")

    def finish(self, timeout_s: float = TIMEOUT_S) -> list[Done]:
        """Wait for the end; as under torchrun, a process that is lost ends the others, a little later.

        Raises:
            TimeoutError: a process still ran after `timeout_s`; all are killed, and the message has what they wrote.
        """
        deadline = time.monotonic() + timeout_s
        while not self.wait(min(0.5, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                alive = self.alive()
                self.kill()
                raise TimeoutError(f"ranks {alive} still run after {timeout_s} s\n{self.words()}")
            alive = self.alive()
            if any(done.status != 0 for rank, done in enumerate(self.done()) if rank not in alive):
                if not self.wait(min(deadline - time.monotonic(), LEFT_BEHIND_S)):
                    self.kill()
                break
        return self.done()

    def kill(self) -> None:
        """SIGKILL to all ranks at once; their checkpoint writers see for themselves that they are alone."""
        for process in filter(None, self.processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait(30)

    def done(self) -> list[Done]:
        """Return what each process has left so far, rank by rank."""
        return [Done(_status(output), _text(f"{output}.stdout"), _text(f"{output}.stderr")) for output in self._outputs]

    @property
    def statuses(self) -> list[int | None]:
        return [done.status for done in self.done()]

    def words(self) -> str:
        """The last that each rank wrote, those first that did not merely lose another one."""
        ranks = []
        for rank, (output, done) in enumerate(zip(self._outputs, self.done(), strict=True)):
            written = done.stderr[-4000:] + _text(f"{output}.native")[-1000:]
            ranks.append(f"rank {rank}, exit {done.status}:\n{written}")
        return "\n".join(sorted(ranks, key=lambda text: "gloo/transport" in text))


class Commands:
    """Command lines of the project in `processes` processes each, in `folder`, as torchrun's would be.

    One process alone has an environment without a launcher's words, as `python SCRIPT` has; `environment` adds to it.
    """

    def __init__(
        self,
        processes: int = 1,
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        server: str = FORK_SERVER,
    ) -> None:
        self._processes = processes
        self._folder = folder
        self._environment = environment or {}
        self._server = server

    def start(self, script: str, *flags: object) -> Running:
        """Begin `script` of the repository (or of its tests) and return while it runs."""
        job = {"script": script, "argv": [str(word) for word in flags], "folder": str(self._folder)}
        return _start(job, self._processes, self._environment, self._server)

    def attempt(self, script: str, *flags: object, timeout_s: float = 600) -> list[Done]:
        """Run `script` to its end, whatever comes of it; what each process left."""
        return self.start(script, *flags).finish(timeout_s)

    def run(self, script: str, *flags: object) -> list[Done]:
        """Run `script` to its good end; what each process left."""
        running = self.start(script, *flags)
        done = running.finish(600)
        assert running.statuses == [0] * self._processes, running.words()
        return done


def call(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    timeout_s: float = 120,
    group: bool = True,
    server: str = FORK_SERVER,
) -> list[Any]:
    """Call `function(rank, *args)` in several processes; return what each rank returned, in the order of ranks.

    The function is a module's top-level one, and what it takes and returns must pickle. RANK, WORLD_SIZE and the rest
    are set as torchrun sets them. The processes share a gloo group; `group` is False where the function makes it.

    Raises:
        RuntimeError: a rank raised; its traceback is in the text.
        TimeoutError: a rank was still running after `timeout_s`.
    """
    file = _OUTPUTS / f"{next(_NUMBERS)}.call"
    file.write_bytes(pickle.dumps((function, args)))
    job = {"call": str(file), "path": sys.path, "group": group, "timeout_s": timeout_s, "folder": os.getcwd()}
    running = _start(job, processes, {}, server, launched=True)
    running.finish(timeout_s)
    if running.statuses != [0] * processes:
        raise RuntimeError(f"{function.__name__}: {running.words()}")
    return [pickle.loads(Path(f"{output}.answer").read_bytes()) for output in running._outputs]


_NUMBERS = itertools.count()
_FOLDER = tempfile.TemporaryDirectory(prefix="launcher-")
_OUTPUTS = Path(_FOLDER.name)
# of each program, by rank; each ends when this process does, and its stdin with it
_SERVERS: dict[str, list[subprocess.Popen[str]]] = defaultdict(list)


def clean_environment() -> dict[str, str]:
    """This process's environment, from which conftest.py hides GPUs, without a launcher's words."""
    variables = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    return variables | {"OMP_NUM_THREADS": "1"}


def _start(
    job: dict[str, Any], processes: int, environment: Mapping[str, str], server: str, launched: bool = False
) -> Running:
    servers = _SERVERS[server]
    while len(servers) < processes:  # the next ones import while the first does
        command = [sys.executable, "-m", *server.split()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        servers.append(subprocess.Popen(command, cwd=ROOT, env=clean_environment(), **pipes))  # type: ignore[call-overload]
    outputs = [_OUTPUTS / f"{number}.{rank}" for number in [next(_NUMBERS)] for rank in range(processes)]
    meeting = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank, process in enumerate(servers[:processes]):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | meeting if processes > 1 or launched else {}
        process.stdin.write(json.dumps(job | {"output": str(outputs[rank]), "environment": place | environment}) + "\n")
        process.stdin.flush()
    children = []
    for process in servers[:processes]:
        answer = process.stdout.readline()
        assert answer, f"the server of {job} ended with {process.poll()}"
        try:
            children.append(psutil.Process(int(answer)))
        except psutil.NoSuchProcess:
            children.append(None)
    return Running(children, outputs)


def free_port() -> int:
    """A port below those that the system gives to connections: one of these may be taken before it is used."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace") if Path(path).exists() else ""


def _status(output: Path) -> int | None:
    text = _text(f"{output}.status")
    return int(text) if text else None


def torchrun(processes: int, script: str | Path, *flags: object) -> "Agent":
    """Begin `script` as a user does, by torchrun or plain Python, in a session of its own; return while it runs."""
    output = _OUTPUTS / f"{next(_NUMBERS)}"
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += [str(ROOT / script), *map(str, flags)]
    with Path(f"{output}.stdout").open("wb") as out, Path(f"{output}.stderr").open("wb") as err:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        return Agent(psutil.Popen(command, cwd=ROOT, env=clean_environment(), start_new_session=True, **pipes), output)


class Agent(Running):
    """A command under torchrun, or of one interpreter; its exit status and output are torchrun's."""

    def __init__(self, agent: psutil.Popen, output: Path) -> None:
        super().__init__([agent], [output])
        self.agent = agent

    def workers(self) -> list[psutil.Process]:
        """The processes of torchrun's ranks, in order."""
        children = [child for child in self.agent.children() if "RANK" in child.environ()]
        return sorted(children, key=lambda child: int(child.environ()["RANK"]))

    def kill(self) -> None:
        """SIGKILL to the whole command at once: torchrun's agent, its workers and their checkpoint writers."""
        family = [self.agent]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += self.agent.children(recursive=True)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=30)

    def done(self) -> list[Done]:
        """The agent's exit status, None while it runs, and what it and its workers have written."""
        (output,) = self._outputs
        return [Done(self.agent.poll(), _text(f"{output}.stdout"), _text(f"{output}.stderr"))]
