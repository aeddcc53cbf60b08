"""The project's commands with their own main() in processes that import Megatron once and stay, for many short runs."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from parity.launch import kill

ROOT = Path(__file__).resolve().parents[1]
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Done:
    """A finished command of one process: its exit status (-1: an exception) and what it said."""

    status: int
    stdout: str
    stderr: str


class Commands:
    """`processes` processes that run each command together, as torchrun's would, in `folder`."""

    def __init__(self, processes: int = 1, folder: Path = ROOT) -> None:
        alone = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
        environments = [alone | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} for _ in range(processes)]
        if processes > 1:
            for rank, environment in enumerate(environments):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                environment.update(place, MASTER_ADDR="127.0.0.1")
        command = [sys.executable, str(Path(__file__).resolve())]
        self._processes = [
            subprocess.Popen(command, cwd=folder, env=one, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for one in environments
        ]

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # it then leaves
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            kill(process)
            assert process.stdout is not None
            process.stdout.close()

    def attempt(self, script: str, *flags: object) -> list[Done]:
        """Run `script` of the repository, whatever comes of it; the answer of each process."""
        request = json.dumps({"script": script, "argv": [str(word) for word in flags], "port": _free_port()})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(request + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        assert all(answers), f"{script} {flags} ended its process: {[p.poll() for p in self._processes]}"
        return [Done(**json.loads(answer)) for answer in answers]

    def run(self, script: str, *flags: object) -> None:
        """Run `script` to its successful end in every process."""
        for done in self.attempt(script, *flags):
            assert done.status == 0, done.stderr


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main_of(script: str) -> Callable[..., int]:
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


def _call(main: Callable[..., int], argv: list[str]) -> Done:
    sys.argv[1:] = argv  # for those that look there
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            status = main(argv) if inspect.signature(main).parameters else main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except Exception:
            traceback.print_exc()
            status = -1
        _leave_groups()
    return Done(status, shown.getvalue(), said.getvalue())


def _leave_groups() -> None:
    """A command that failed has not."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _serve() -> None:
    """One request per line of stdin, one answer per line of stdout, which the commands themselves do not see."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mains: dict[str, Callable[..., int]] = {}
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        os.environ["MASTER_PORT"] = str(request["port"])
        script = request["script"]
        if script not in mains:
            mains[script] = _main_of(script)
        answers.write(json.dumps(vars(_call(mains[script], request["argv"]))) + "\n")
        answers.flush()
    for child in multiprocessing.active_children():  # checkpoint writers
        child.terminate()
    os._exit(0)  # taking the interpreter down costs a second


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _serve()
