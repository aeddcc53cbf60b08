"""Puts limits and namespaces around a process and executes judge.py in it; a script of its own, run by sandbox.py.

Three processes: this one waits; the first of the new process namespace, whose end ends every other; and the program.
This one dies by the caller's signal, and the namespace's first with it.

It uses nothing but the standard library, because it runs as `python -I -S`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

REFUSAL = "cannot confine: "  # as in sandbox.py, on standard error, which the program cannot reach
NEW_USER, NEW_MOUNT, NEW_NETWORK, NEW_PROCESSES, NEW_IPC = 0x10000000, 0x00020000, 0x40000000, 0x20000000, 0x08000000
READ_ONLY, NOSUID, NODEV, NOEXEC, BIND, MOVE, RECURSIVE, PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 13, 1 << 14, 1 << 18
REMOUNT = 1 << 5
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # the call's number is every architecture's
DEVICES = ("null", "zero", "full", "random", "urandom")
DIE_WITH_PARENT, NO_NEW_PRIVILEGES = 1, 38
INSIDE, NOBODY_INSIDE, NOBODY = 1000, 1001, 65534

_libc = ctypes.CDLL(None, use_errno=True)


def main(told: dict[str, Any]) -> int:
    """Execute judge.py, and return its exit status, 128 and the signal where one killed it."""
    if told["network"]:
        return _waited(_program(told))
    if os.getuid() == 0 and _read("/proc/self/uid_map").split()[:2] == ["0", "0"]:
        # the kernel counts no processes of root's. One whose real user is nobody is counted, and reads what root may
        os.setresgid(0, 0, 0)
        users = f"{INSIDE} 0 1\n{NOBODY_INSIDE} {NOBODY} 1\n"
    else:
        users = f"{INSIDE} {os.getuid()} 1\n"
    ready, go = os.pipe(), os.pipe()
    first = os.fork()
    if first == 0:
        try:
            _call(_libc.unshare(NEW_USER | NEW_MOUNT | NEW_NETWORK | NEW_PROCESSES | NEW_IPC), "namespaces")
            os.write(ready[1], b".")
            os.close(go[1])
            if os.read(go[0], 1) != b".":
                os._exit(1)
            os._exit(_inside(told, nobody="\n" in users.strip()))
        except OSError as error:
            _refuse(error)
    os.close(ready[1])
    if os.read(ready[0], 1) == b".":
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", users), ("gid_map", f"{INSIDE} {os.getgid()} 1\n")):
                with open(f"/proc/{first}/{name}", "w") as file:
                    file.write(text)
        except OSError as error:
            os.kill(first, signal.SIGKILL)
            _refuse(error)
        os.write(go[1], b".")
    return _waited(first)


def _inside(told: dict[str, Any], *, nobody: bool) -> int:
    """Arrange the files, and start the namespace's processes; the program's exit status."""
    _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    _arrange_files(told["folder"], told["hidden"], f"size={told['files_bytes']},mode=777")
    os.chdir(told["folder"])
    first = os.fork()
    if first:
        return _waited(first)
    _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    try:
        # containers that mask parts of /proc may not mount another; the old one then shows processes out of reach.
        # Read-only as that one is, because the kernel's settings are root's, who may be this user
        _libc.mount(b"proc", b"/proc", b"proc", READ_ONLY | NOSUID | NODEV | NOEXEC, None)
        if nobody:
            os.setresuid(NOBODY_INSIDE, INSIDE, INSIDE)
        program = _program(told)
    except OSError as error:
        _refuse(error)
    status = None
    while status is None:  # the first process of a namespace is the parent of all that lose their own
        ended, how = os.wait()
        if ended == program:
            status = _status(how)
    os._exit(status)


def _arrange_files(folder: str, hidden: list[str], size: str) -> None:
    """Make all files read-only but a new, empty `folder` and /dev/shm, and hide devices and what is in `hidden`.

    A read-only mount keeps nobody from writing to a device or a socket that it holds.
    """
    _mount(None, "/", None, PRIVATE | RECURSIVE)
    _mount("tmpfs", folder, "tmpfs", NOSUID, size)  # stands here until it is all there
    for name in DEVICES:
        with open(f"{folder}/{name}", "w"):
            pass
        _mount(f"/dev/{name}", f"{folder}/{name}", None, BIND)
    os.symlink("/proc/self/fd", f"{folder}/fd")
    os.mkdir(f"{folder}/shm")
    _mount(folder, "/dev", None, MOVE)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    _call(_libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, 32), "read-only files")
    hidden = [path for path in hidden if os.path.isdir(path)]
    for path in ("/dev/shm", *hidden):
        _mount("tmpfs", path, "tmpfs", NOSUID | NODEV, size)
    os.makedirs(folder, exist_ok=True)  # it may have been in one of these
    for path in hidden:
        _mount(None, path, None, REMOUNT | BIND | READ_ONLY | NOSUID | NODEV)
    _mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, size)


def _program(told: dict[str, Any]) -> int:
    """Start judge.py under limits; its process ID."""
    seconds, memory, files = told["seconds"], told["memory_bytes"], told["files_bytes"]
    program = os.fork()
    if program:
        return program
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # a signal that tells of it, before the other
        for limit, most in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, files),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 256),
            *([] if told["network"] else [(resource.RLIMIT_NPROC, told["processes"])]),
        ):
            hard = resource.getrlimit(limit)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))
        _call(_libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
        environment = {
            "LC_ALL": "C.UTF-8",
            "PATH": os.defpath,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            **dict.fromkeys(("HOME", "TMPDIR", "MPLCONFIGDIR"), told["folder"]),
        }
        os.execve(sys.executable, [sys.executable, "-I", told["judge"]], environment)
    except OSError as error:
        _refuse(error)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _call(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def _call(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _waited(process: int) -> int:
    return _status(os.waitpid(process, 0)[1])


def _status(how: int) -> int:
    """Return the exit status of a process, 128 and the signal where one killed it."""
    code = os.waitstatus_to_exitcode(how)
    return code if code >= 0 else 128 - code


def _refuse(error: OSError) -> NoReturn:
    """Say why nothing is run, and leave."""
    os.write(2, f"{REFUSAL}{error.strerror or error}\n".encode())
    os._exit(1)


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))
