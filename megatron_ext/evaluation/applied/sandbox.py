"""Programs that a model wrote, run where they can do no harm, each in processes of its own.

    sandbox.py -> confine.py -> judge.py -> the program

confine.py puts limits and namespaces around the process and executes judge.py in it, which runs the program and says
how it ended. What a program gets:

    time                 seconds of a core by RLIMIT_CPU, and as many of the clock, after which all its processes die
    memory               of each process by RLIMIT_AS; files by a tmpfs of FILES_BYTES
    processes            PROCESSES by RLIMIT_NPROC, in a process namespace that ends with the program
    network              none: an empty network namespace
    files                all others are read-only; its own folder is an empty tmpfs, gone when it ends. Of devices there
                         are null, zero and random numbers. /run, /tmp and /var/tmp, where services and sessions have
                         their sockets, are empty (the last two only where Python and this package lie elsewhere)
    environment          a locale, LD_LIBRARY_PATH and its own folder; python -I: no user's packages

Where the kernel refuses namespaces, nothing runs: a container may need `--security-opt seccomp=unconfined`. Without
them (`network=True`) only time, memory and, for users other than root, processes are limited.

Why not a library: those on PyPI restrict Python's names (RestrictedPython) or wrap a container's daemon; nsjail and
bubblewrap are programs that clusters seldom have.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from megatron_ext.errors import UserError

PROCESSES = 64
FILES_BYTES = 64 << 20
REFUSAL = b"cannot confine: "  # begins what confine.py says where the kernel refuses
MOST_SAID = 4096  # bytes that are kept of what is written: a program can reach the verdict's pipe
_HERE = Path(__file__).parent


class Ending(StrEnum):
    """Says how a program ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    KILLED = "killed"


@dataclass(frozen=True)
class Verdict:
    """Says how a program ended, and in a few words why."""

    ending: Ending
    reason: str = ""


@dataclass(frozen=True)
class Limits:
    """Bounds a program.

    Attributes:
        seconds: of a core, and of the clock.
        memory_mib: of each of its processes.
        network: run without namespaces, so that it has the network and may write what its user may.
    """

    seconds: int = 10
    memory_mib: int = 4096
    network: bool = False


@dataclass(frozen=True)
class Job:
    """Holds a program to be judged.

    Attributes:
        code: the program, tests included.
        unittest: run the `TestCases` in it; else running it to its end is to pass.
    """

    code: str
    unittest: bool = False


class SandboxError(UserError):
    """Says that no program can be run here."""

    of_this_process = True


class RefusedError(SandboxError):
    """Says that the kernel does not let programs be confined."""


def check_sandbox(limits: Limits) -> None:
    """Run an empty program.

    Raises:
        RefusedError: it cannot be confined.
        SandboxError: it does not pass.
    """
    verdict = judge(Job("pass\n"), limits)
    if verdict.ending is not Ending.PASSED:
        raise SandboxError(
            f"code_memory, code_seconds: with {limits.memory_mib} MiB and {limits.seconds} s an empty program "
            f"{verdict.ending} ({verdict.reason}); raise --code-memory or --code-seconds"
        )


def judge(job: Job, limits: Limits) -> Verdict:
    """Run a program under limits, and say how it ended; no more than `limits.seconds` and a few.

    Raises:
        RefusedError: it cannot be confined.
    """
    nonce = secrets.token_hex(16)  # the program may end in any way, and print anything: only this means that it passed
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        told = {
            "folder": os.path.realpath(folder),
            "hidden": _hidden(),
            "judge": str(_HERE / "judge.py"),
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_mib << 20,
            "processes": PROCESSES,
            "files_bytes": FILES_BYTES,
            "network": limits.network,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "confine.py"), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"LC_ALL": "C.UTF-8"} | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            start_new_session=True,
        )
        try:
            # a second more than the program's: starting takes a part of it
            said, complaint = _exchange(
                process, json.dumps(asdict(job) | {"nonce": nonce}).encode(), limits.seconds + 1
            )
        except subprocess.TimeoutExpired:
            return Verdict(Ending.TIMED_OUT, f"{limits.seconds} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
    if complaint.startswith(REFUSAL):
        raise RefusedError(
            f"code: programs cannot be confined here ({complaint.removeprefix(REFUSAL).decode().strip()}); allow user "
            "namespaces (in a container: --security-opt seccomp=unconfined), or pass --allow-network to run them "
            "with limits of time and memory alone"
        )
    return _verdict(process.returncode, said, complaint, nonce)


def _hidden() -> list[str]:
    """List the folders that are emptied: those where sockets lie, and nothing that Python needs."""
    needed = [sys.executable, sys.prefix, sys.base_prefix, str(_HERE)]
    needed += [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    real = {end for path in needed for end in (os.path.abspath(path), os.path.realpath(path))}
    shared = [path for path in ("/tmp", "/var/tmp") if not any(Path(end).is_relative_to(path) for end in real)]
    return ["/run", *shared]


def _exchange(process: subprocess.Popen[bytes], told: bytes, seconds: float) -> tuple[bytes, bytes]:
    """Give a process its input, and return the ends of what it wrote, to standard output and to standard error.

    Raises:
        TimeoutExpired: it has not ended after `seconds`.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    until = time.monotonic() + seconds
    ends = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    wanted = list(ends)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdin, selectors.EVENT_WRITE)
        for descriptor in wanted:
            waiting.register(descriptor, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(until - time.monotonic(), 0))
            if not ready or time.monotonic() > until:
                raise subprocess.TimeoutExpired(process.args, seconds)
            for key, _ in ready:
                if key.fd in ends:
                    read = os.read(key.fd, 1 << 16)
                    ends[key.fd] = (ends[key.fd] + read)[-MOST_SAID:]
                    ended = not read
                else:
                    try:
                        told = told[os.write(key.fd, told) :]
                    except BrokenPipeError:
                        told = b""
                    ended = not told
                if ended:
                    waiting.unregister(key.fileobj)
                    if key.fd not in ends:
                        process.stdin.close()
    process.wait(max(until - time.monotonic(), 0))
    return ends[wanted[0]], ends[wanted[1]]


def _verdict(status: int, said: bytes, complaint: bytes, nonce: str) -> Verdict:
    word, _, reason = said[-1000:].decode(errors="replace").strip().rpartition("\n")[2].partition(" ")
    if status == 0 and word == nonce:
        return Verdict(Ending.FAILED, reason) if reason else Verdict(Ending.PASSED)
    if status == 128 + signal.SIGXCPU:
        return Verdict(Ending.TIMED_OUT, "seconds of a core")
    if status > 128:
        return Verdict(Ending.KILLED, f"signal {status - 128}")
    why = complaint.decode(errors="replace").strip().partition("\n")[0][:200]  # judge.py's or the loader's
    return Verdict(Ending.FAILED, f"left with status {status} before its end{why and ': '}{why}")
