"""Read the rank, world size and rendezvous address from the environment set by torchrun or Slurm.

RANK, WORLD_SIZE, LOCAL_RANK    all unset for a single process
LOCAL_WORLD_SIZE                processes on this node, by torchrun; only checked
MASTER_ADDR, MASTER_PORT        rendezvous address of several processes; a single one ignores it

Neither srun nor mpirun sets them: without a launcher, each of their tasks would be a run of its own.
"""

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError, echo
from megatron_ext.files.atomic import atomic_write

_REMEDY = "start with torchrun or examples/slurm/launch.sh"
# The number of tasks that were started together: by srun (a batch script and a shell of salloc have none), by Open MPI,
# by MPICH and Intel MPI, and by MVAPICH.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


class LaunchError(UserError):
    """Reports an invalid environment; every process prints it, because the first one may be unknown."""

    of_this_process = True


@dataclass(frozen=True)
class Launch:
    """Rank of this process, world size, and local rank on its node (the index of its GPU)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def read_launch() -> Launch:
    """Read this process's rank and the world size.

    Raises:
        LaunchError: a number is out of range; only one of RANK and WORLD_SIZE is set, or none in one of several tasks;
            or several processes have no rendezvous address, or one whose host is unknown.
    """
    environment = os.environ
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        _refuse_tasks()
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environment and other in environment:
            raise LaunchError(f"{name}: got none, RANK and WORLD_SIZE need each other; {_REMEDY}")
    size = _number("WORLD_SIZE", 1, 1, 2**20)
    local_size = _number("LOCAL_WORLD_SIZE", size, 1, size)
    launch = Launch(_number("RANK", 0, 0, size - 1), size, _number("LOCAL_RANK", 0, 0, local_size - 1))
    if size == 1:
        return launch
    host = environment.get("MASTER_ADDR")
    if not (host and environment.get("MASTER_PORT")):
        raise LaunchError(f"MASTER_ADDR, MASTER_PORT: got none, several processes need them to connect; {_REMEDY}")
    _number("MASTER_PORT", 1, 1, 65535)
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == socket.EAI_AGAIN:
            return launch  # torch tries again
        needs = f"needs the host of rank 0 ({getattr(error, 'strerror', error)})"
        raise LaunchError(f"MASTER_ADDR: got {echo(host)}, {needs}; {_REMEDY}") from None
    return launch


def _refuse_tasks() -> None:
    """Raise LaunchError in one of several tasks: without a rank, each would do all of the work."""
    for name in _TASKS:
        tasks = os.environ.get(name, "1")
        if tasks != "1":
            raise LaunchError(
                f"RANK, WORLD_SIZE: got none in one of several tasks ({name} {echo(tasks)}), and each would do all of "
                f"the work; {_REMEDY}"
            )


def _number(name: str, default: int, low: int, high: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("0|[1-9][0-9]{0,8}", text) or not low <= int(text) <= high:
        raise LaunchError(f"{name}: got {echo(text)}, needs {low}..{high}; {_REMEDY}")
    return int(text)


def is_first() -> bool:
    """Return whether this process is rank 0 or the only one."""
    return os.environ.get("RANK", "0") == "0"


def report_to_torchrun(message: str) -> None:
    """Write the error file that torchrun reads when this process fails; the earliest one is the root cause."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), atomic_write(Path(file)) as aside:
        aside.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
