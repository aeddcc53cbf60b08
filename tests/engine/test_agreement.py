"""What process 0 alone meets is every process's refusal: none waits for another."""

import errno
import os
from pathlib import Path

from megatron_ext.config import Config, DataConfig
from megatron_ext.engine.agreement import run_on_rank0
from megatron_ext.errors import UserError
from megatron_ext.run.identity import data_fingerprints
from tests.launcher import call


def refusal(rank: int) -> str:
    """What a process is told where the data has gone since the run opened it."""
    try:
        config = Config(data=DataConfig(data_path=("/gone/data",)))
        run_on_rank0(lambda: data_fingerprints(config), Path())
    except UserError as error:
        return str(error)
    return "no refusal"


def test_data_that_has_gone_is_refused_by_every_process() -> None:
    assert call(refusal, 2) == ["data: /gone/data.idx cannot be read (No such file or directory); check the path"] * 2


def error_of(rank: int, number: int) -> str:
    """The error of a process if the system gives this one to process 0."""

    def fails() -> None:
        raise OSError(number, os.strerror(number), "runs/a/file")

    try:
        run_on_rank0(fails, Path("runs/a"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_only_a_lasting_error_is_a_user_error() -> None:
    """A user error ends a job for good; after a crash it is started again."""
    for text in call(error_of, 2, errno.ENOSPC):
        assert text.startswith("UserError: save: runs/a/file cannot be written (No space left on device)")
    first, second = call(error_of, 2, errno.EIO)
    assert first == "OSError: [Errno 5] Input/output error: 'runs/a/file'"
    assert second.startswith("RuntimeError: another process has failed: ")
