"""Read the rank, world size and rendezvous address from the environment set by torchrun or Slurm.

RANK, WORLD_SIZE, LOCAL_RANK    all unset for a single process
MASTER_ADDR, MASTER_PORT        rendezvous address of several processes
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.files.atomic import atomic_write

_REMEDY = "start with torchrun or examples/slurm/launch.sh"


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
        LaunchError: only one of RANK and WORLD_SIZE is set, or several processes have no rendezvous address.
    """
    environment = os.environ
    if ("RANK" in environment) != ("WORLD_SIZE" in environment):
        missing = "WORLD_SIZE" if "RANK" in environment else "RANK"
        raise LaunchError(f"{missing}: got none, RANK and WORLD_SIZE need each other; {_REMEDY}")
    size = int(environment.get("WORLD_SIZE", 1))
    if size > 1 and not (environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")):
        raise LaunchError(f"MASTER_ADDR, MASTER_PORT: got none, several processes need them to connect; {_REMEDY}")
    return Launch(int(environment.get("RANK", 0)), size, int(environment.get("LOCAL_RANK", 0)))


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
