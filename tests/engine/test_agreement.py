"""What process 0 alone meets is every process's refusal: none waits for another."""

import errno
import os
from pathlib import Path

from megatron_ext.config import Config, DataConfig
from megatron_ext.engine.agreement import run_on_rank0, together
from megatron_ext.errors import UserError
from megatron_ext.run.identity import data_fingerprints
from tests.launcher import call


def refusal(rank: int) -> str:
    """Return what a process is told where the data has gone since the run opened it."""
    try:
        config = Config(data=DataConfig(data_path=("/gone/data",)))
        run_on_rank0(lambda: data_fingerprints(config), Path())
    except UserError as error:
        return str(error)
    return "no refusal"


def test_data_that_has_gone_is_refused_by_every_process() -> None:
    assert call(refusal, 2) == ["data: /gone/data.idx cannot be read (No such file or directory); check the path"] * 2


def told(rank: int, error: Exception | None, all_act: bool) -> str:
    """Return what a process raises when process 0 meets an error, in what it does alone or in what all do together."""

    def act() -> None:
        if rank == 0 and error is not None:
            raise error

    try:
        together(act) if all_act else run_on_rank0(act, Path("runs/a"))
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def test_only_a_lasting_error_is_a_user_error() -> None:
    """A user error ends a job for good; after a crash it is started again."""
    full, broken = (OSError(number, os.strerror(number), "runs/a/file") for number in (errno.ENOSPC, errno.EIO))
    for text in call(told, 2, full, False):
        assert text.startswith("UserError: save: runs/a/file cannot be written (No space left on device)")
    for all_act in (False, True):
        first, second = call(told, 2, broken, all_act)
        assert first == "OSError: [Errno 5] Input/output error: 'runs/a/file'"
        assert second.startswith("OtherProcessError: another process has failed: ")
    assert call(told, 2, UserError("a is damaged"), True) == ["UserError: a is damaged"] * 2
    assert call(told, 2, None, True) == ["nothing"] * 2
