"""What a launcher tells each process by its environment, checked before any process waits for another; what it is told.

torchrun and examples/slurm/launch.sh set all of it; a process without any of it is alone.

    RANK 0..WORLD_SIZE-1    LOCAL_RANK 0..WORLD_SIZE-1, 0 if not given    WORLD_SIZE from 1
    MASTER_ADDR, MASTER_PORT    where the processes meet; needed by more than one
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError

_DIGITS = 9
_HOST = re.compile(r"[\w.:%-]+")  # a name, or an address of IPv4 or IPv6
_MOST_SECONDS = 60.0  # that a name may take to get an address: its node's own may not be up yet
_REMEDY = "start with torchrun or examples/slurm/launch.sh"


class LaunchError(UserError):
    """Refuses what the launcher said; every process says it, for no one knows which is the first."""

    of_this_process = True


@dataclass(frozen=True)
class Launch:
    """Numbers one process among those of its run.

    Attributes:
        rank, world_size: its number, and how many there are.
        local_rank: its number among those of its node, which is that of its GPU.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Read this process's numbers, in a run whose processes can meet.

    Raises:
        LaunchError: a number that is none or out of range, one of RANK and WORLD_SIZE without the other, several
            processes without MASTER_ADDR and MASTER_PORT.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if len(given) == 1:
        (missing,) = {"RANK", "WORLD_SIZE"} - set(given)
        raise LaunchError(
            f"{missing}: got none beside {given[0]}={environment[given[0]]}, needs both or neither; {_REMEDY}, or "
            f"unset {given[0]}"
        )
    size = world_size(environment)
    launch = Launch(
        rank=_number(environment, "RANK", 0, 0, size - 1, f"as WORLD_SIZE is {size}"),
        world_size=size,
        local_rank=local_rank(environment),
    )
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name, "").strip():
                raise LaunchError(f"{name}: got none, {size} processes need it to meet; {_REMEDY}, or set it")
    _number(environment, "MASTER_PORT", 0, 0 if size == 1 else 1, 65535, "a free port of MASTER_ADDR")
    return launch


def check_meeting_place(environment: Mapping[str, str], rank: int, timeout_s: float = _MOST_SECONDS) -> None:
    """Look whether the processes can meet where they are told to, right before they do.

    Args:
        environment: that `read_launch` has read.
        rank: of this process; 0 opens the port, unless torchrun has.
        timeout_s: how long a host may have no address, a minute at most.

    Raises:
        LaunchError: what can be no host, or a port that process 0 cannot open.
        RuntimeError: the host still has no address; another start may find it.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    _await_address(host, port, min(timeout_s, _MOST_SECONDS))
    if rank or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                return  # torch has other ways to open it
            raise LaunchError(
                f"MASTER_PORT: got {port}, which cannot be opened ({os.strerror(error.errno)}); choose another one"
            ) from None


def _await_address(host: str, port: int, timeout_s: float) -> None:
    """Ask for a host's address until there is one: a resolver that is busy or restarts says the same as of a typo."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            if not _HOST.fullmatch(host):
                raise UnicodeError("of letters, digits and .:%-")
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except UnicodeError as error:  # of a label that is empty or too long too
            raise LaunchError(f"MASTER_ADDR: got {host[:80]!r}, needs a host ({error}); {_REMEDY}") from None
        except OSError as error:
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"MASTER_ADDR: {host[:80]!r} has had no address for {timeout_s:.0f} s ({error.strerror or error}); "
                    "see to the name or to the resolver, and start again"
                ) from error
        time.sleep(1)


def is_first(environment: Mapping[str, str]) -> bool:
    """Tell whether this process speaks for all: 0, however many digits that has, or alone.

    It may ask before `read_launch` has looked at the environment, so that what it refuses is a good number of no one.
    """
    return _is_zero(environment.get("RANK", "0"))


def is_first_of_node(environment: Mapping[str, str]) -> bool:
    """Tell whether this process speaks for those of its node, as `is_first` does for all."""
    return _is_zero(environment.get("LOCAL_RANK", "0"))


def _is_zero(number: str) -> bool:
    return bool(number) and not number.strip("0")


def world_size(environment: Mapping[str, str]) -> int:
    """Read the number of processes, 1 where nobody says.

    Raises:
        LaunchError: WORLD_SIZE is no number from 1 on.
    """
    return _number(environment, "WORLD_SIZE", 1, 1, 10**_DIGITS - 1, "processes of all nodes")


def local_rank(environment: Mapping[str, str]) -> int:
    """Read this process's number on its node, 0 where nobody says.

    Raises:
        LaunchError: LOCAL_RANK is no number below WORLD_SIZE.
    """
    size = world_size(environment)
    return _number(environment, "LOCAL_RANK", 0, 0, size - 1, f"as WORLD_SIZE is {size}")


def _number(environment: Mapping[str, str], name: str, default: int, low: int, high: int, why: str) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and low <= int(text) <= high):
        raise LaunchError(f"{name}: got {text[:40]!r}, needs a number {low}..{high}, {why}; {_REMEDY}, or correct it")
    return int(text)


def leave_to_torchrun(line: str) -> None:
    """Write the file that torchrun reads when a process has failed, as torch.distributed.elastic's `record` does.

    torchrun takes what was written first for the cause of all; so does tools/launch.py.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    said = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
    aside = Path(f"{file}.part")  # a file that is cut off would be torchrun's own crash
    with contextlib.suppress(OSError):
        aside.write_text(json.dumps({"message": said}), encoding="utf-8")
        aside.replace(file)
