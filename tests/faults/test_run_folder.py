"""One trainer for each run folder, whatever becomes of the trainer or the folder."""

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import yaml

from megatron_ext.checkpoint.folders import saved_steps
from megatron_ext.errors import UserError
from megatron_ext.files.lock import lock
from tests.conftest import SmallData
from tests.faults.test_kills import assert_complete
from tests.launcher import TIMEOUT_S, Commands, wait_until
from tests.runs import CONFIG, TRAINER, read_jsonl, refusal, refusal_of_all, series

ENDLESS = [*CONFIG, "--seq-length", 64, "--window-schedule", "constant", "--lr-decay-iters", 9]
ENDLESS += ["--train-iters", 100_000, "--save-interval", 2, "--keep-last", 2]


def test_a_second_trainer_is_refused_until_the_first_is_gone(small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*ENDLESS, *small_data.flags, "--save", run, "--load", run, "--load-if-present"]
    first = Commands().start(TRAINER, *flags)
    first.wait_for(lambda: bool(saved_steps(run)))
    line = refusal_of_all(Commands(2).attempt(TRAINER, *flags, timeout_s=TIMEOUT_S))
    assert f"save: {run} is in use by host " in line
    assert f", pid {first.processes[0].pid}, since 20" in line
    steps = len(read_jsonl(run / "metrics.jsonl"))
    first.wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) > steps + 3)
    first.kill()
    assert_complete(run)
    second = Commands().start(TRAINER, *flags)
    second.wait_for(lambda: max(saved_steps(run)) > steps + 10)
    second.signal(signal.SIGTERM)
    assert second.finish()[0].status == 85
    assert series(run, "step") == list(range(max(saved_steps(run))))


def hold(folder: Path, to_parent: Connection, job: str | None, seconds: float) -> None:
    """Lock a folder, fork a child that outlives this process, and wait."""
    if job:
        os.environ["SLURM_JOB_ID"] = job
    held = lock(folder, "save")
    child = os.fork()
    to_parent.send(child or os.getpid())
    time.sleep(seconds if child else TIMEOUT_S)
    held.close()
    os._exit(0)


@contextlib.contextmanager
def holding(folder: Path, job: str | None = None, seconds: float = TIMEOUT_S) -> Iterator[Callable[[], None]]:
    """Another process has the lock; yields what kills it."""
    parent_end, child_end = Pipe()
    holder = get_context("fork").Process(target=hold, args=(folder, child_end, job, seconds))
    holder.start()
    children = {parent_end.recv(), parent_end.recv()} - {holder.pid}
    try:
        yield lambda: (holder.kill(), holder.join())[1]
    finally:
        holder.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_child_does_not_keep_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    with holding(tmp_path) as kill:
        with pytest.raises(UserError, match="in use by host"):
            lock(tmp_path, "save")
        kill()
        lock(tmp_path, "save").close()


def test_an_earlier_start_of_the_same_job_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(tmp_path, job="47", seconds=2):
        monkeypatch.setenv("SLURM_JOB_ID", "4")
        with pytest.raises(UserError, match="job 47, since"):
            lock(tmp_path, "save")
        monkeypatch.setenv("SLURM_JOB_ID", "47")
        lock(tmp_path, "save").close()


def test_a_run_in_stages_locks_their_folders_too(small_data: SmallData, tmp_path: Path) -> None:
    """A start with --save RUN/STAGE names such a folder as well."""
    run = {"stages": [{"name": "short"}, {"name": "long"}]} | yaml.safe_load(Path(CONFIG[1]).read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    folder = tmp_path / "run" / "long"
    folder.mkdir(parents=True)
    with holding(folder):
        flags = ["--config", tmp_path / "run.yaml", *small_data.flags, "--save", folder.parent]
        (done,) = Commands().attempt(TRAINER, *flags)
    assert f"save: {folder} is in use by host " in refusal(done)


def test_a_file_system_without_locks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        with mock.patch.object(fcntl, "lockf", side_effect=OSError(number, os.strerror(number))):
            lock(tmp_path, "save").close()
        assert f"{tmp_path} cannot be locked ({os.strerror(number)})" in caplog.messages[-1]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["moved", "replaced"])
def test_a_run_whose_folder_is_gone_ends(small_data: SmallData, tmp_path: Path, what: str) -> None:
    """It ends even if another run has begun in its place."""
    run = tmp_path / "run"
    saving = ["--async-save"] if what == "moved" else []
    running = Commands(2).start(TRAINER, *ENDLESS, *small_data.flags, *saving, "--save-interval", 20, "--save", run)
    running.wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) > 22 and bool(saved_steps(run)))
    run.rename(tmp_path / "moved")
    if what == "replaced":
        (run / "checkpoints").mkdir(parents=True)
    assert f"save: {run} was moved or deleted" in refusal_of_all(running.finish())
    assert wait_until(lambda: not running.alive(), 10)
    assert not [path for path in run.rglob("*") if path.is_file()]
