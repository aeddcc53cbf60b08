"""Lock a folder with a lock of the kernel, which ends with this process, however that ends.

FOLDER/lock    the holder in one line, for the messages of others; the file stays when the lock ends

The lock is fcntl's: with flock's, a child process would keep the lock of a killed parent. docs/checkpoints.md says
which file systems have it.
"""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from megatron_ext.errors import UserError, printable
from megatron_ext.files.atomic import write_whole

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
PATIENCE_S = 120  # NFS 4 keeps the locks of a lost node for 90 s
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


def lock(folder: Path, option: str) -> FileIO:
    """Lock a folder until the returned file is closed; warn if its file system has no locks.

    An earlier start of the same Slurm job may still be ending on another node: its lock is waited for.

    Raises:
        UserError: another process holds the lock; the message names it and the `option` of the folder.
        OSError: the folder cannot be written.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    job = f" job {job_id}," if job_id else ""
    file = (folder / LOCK_FILE).open("a+b", buffering=0)
    for seconds in range(PATIENCE_S + 1):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                logger.warning("warning: %s cannot be locked (%s): start no other trainer", folder, error.strerror)
                break
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        file.seek(0)
        holder = printable(file.readline(200).decode(errors="replace").strip())
        if not job or job not in holder or seconds == PATIENCE_S:
            holder = holder or "a process that has just started"
            raise UserError(f"{option}: {folder} is in use by {holder}; wait for its end or choose another folder")
        time.sleep(1)
    file.truncate(0)
    text = f"host {socket.gethostname()}, pid {os.getpid()},{job} since {time.strftime('%F %T %z')}\n"
    write_whole(file, text.encode())
    os.fsync(file.fileno())  # NFS shows it to others only then
    return file


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock a file, made if missing, for the context; yield False if another process has locked it.

    Threads of one process do not exclude each other.

    Raises:
        OSError: the file cannot be written, or its file system has no locks.
    """
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            locked = False
        yield locked
