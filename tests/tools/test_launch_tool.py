"""tools/launch.py with real processes: the exit status is the first one's, and its line is the last."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launcher import ROOT, clean_environment, wait_until

from megatron_ext.errors import UserError
from tools.launch import SAME_S, start

WORKER = """
import os, signal, sys, time
from pathlib import Path
from megatron_ext.command_line import command
from megatron_ext.errors import UserError

@command
def main(argv):
    rank = int(os.environ["RANK"])
    if argv == ["refuse"]:  # the one that speaks is the later one
        begun = Path(__file__).with_name("begun")
        left = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "1" / "error.json"
        if not rank:
            begun.touch()
        while not (begun if rank else left).exists():
            time.sleep(0.01)
        raise UserError("lr: got -1, needs > 0")
    if argv == ["fault"] and rank:
        raise RuntimeError("no luck")
    if argv == ["die"] and rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if argv == ["saved"]:
        return 85
    if argv == ["wait"]:
        signal.signal(signal.SIGUSR1, lambda *_: (print("saving", rank, flush=True), sys.exit(85)))
    if argv == ["hang"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: print("asked", flush=True))
        print(os.getpid(), flush=True)
        time.sleep(500)
    print("begun", flush=True)
    time.sleep(30 if argv else 0)
    return 0

sys.exit(main())
"""
LAUNCH = (str(ROOT / "tools" / "launch.py"),)
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return file


def begin(launcher: tuple[str, ...], *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "--nproc-per-node", "2", *map(str, words)]
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]


def end(begun: subprocess.Popen[str]) -> tuple[int, list[str]]:
    _, said = begun.communicate(timeout=120)
    return begun.returncode, said.splitlines()


def test_bad_input_is_one_line_and_the_cause_of_it(worker: Path) -> None:
    assert end(begin(LAUNCH, worker, "refuse")) == (
        2,
        ["error: lr: got -1, needs > 0", "rank 0 ended with exit status 2: lr: got -1, needs > 0"],
    )


@pytest.mark.slow
def test_torchrun_ends_with_the_line_whoever_was_first(worker: Path) -> None:
    status, said = end(begin(TORCHRUN, worker, "refuse"))
    assert status == 1
    assert said[0] == "error: lr: got -1, needs > 0"
    assert said[-2] == "  traceback : lr: got -1, needs > 0"


@pytest.mark.slow
def test_a_traceback_can_be_had_of_what_it_starts(worker: Path) -> None:
    status, said = end(begin(LAUNCH, worker, "refuse", "--debug"))
    assert status == 1
    assert "megatron_ext.errors.UserError: lr: got -1, needs > 0" in said
    assert "tools/launch.py" not in "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "status", "last"),
    [
        (
            "fault",
            1,
            "rank 1 ended with exit status 1: RuntimeError: no luck; no fault of the input: .*",
        ),
        ("die", 137, "rank 1 was ended by SIGKILL"),
        ("saved", 85, "rank [01] ended with exit status 85"),
    ],
)
def test_the_exit_status_is_that_of_the_first_to_end(worker: Path, does: str, status: int, last: str) -> None:
    got, said = end(begin(LAUNCH, worker, does))
    assert got == status
    assert re.fullmatch(last, said[-1])
    assert len(said) == (2 if does == "fault" else 1)


@pytest.mark.slow
def test_it_is_quiet_about_what_ends_well(worker: Path) -> None:
    assert end(begin(LAUNCH, worker)) == (0, [])


@pytest.mark.slow
def test_a_warning_reaches_every_process(worker: Path) -> None:
    begun = begin(LAUNCH, worker, "wait")
    assert begun.stdout is not None
    assert [begun.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    begun.send_signal(signal.SIGUSR1)
    out, said = begun.communicate(timeout=120)  # not the ten minutes
    assert sorted(out.splitlines()) == ["saving 0", "saving 1"]
    assert begun.returncode == 128 + signal.SIGUSR1
    assert said.splitlines()[-1] == "stopped by SIGUSR1"


@pytest.mark.slow
def test_a_second_signal_ends_what_hangs_and_a_third_leaves_nobody_behind(worker: Path) -> None:
    begun = begin(LAUNCH, worker, "hang")
    assert begun.stdout is not None
    workers = [psutil.Process(int(begun.stdout.readline())) for _ in range(2)]
    try:
        for pause_s in (1.5 * SAME_S, 1.5 * SAME_S, 0.0):
            begun.send_signal(signal.SIGINT)
            assert [begun.stdout.readline() for _ in workers] == ["asked\n"] * 2
            assert all(one.is_running() for one in workers)
            time.sleep(pause_s)
        _, said = begun.communicate(timeout=120)  # not the ten minutes
        assert begun.returncode == 128 + signal.SIGINT
        assert said.splitlines()[-1] == "stopped by SIGINT"
        assert wait_until(lambda: not any(one.is_running() for one in workers), 30)
    finally:
        for one in filter(psutil.Process.is_running, workers):
            one.kill()


@pytest.mark.slow
def test_a_command_is_found_beside_the_launcher(tmp_path: Path) -> None:
    """As in an environment that is not activated."""
    (tmp_path / "bin").mkdir()
    shutil.copy(LAUNCH[0], tmp_path / "bin" / "megatron-ext-launch")
    command = tmp_path / "bin" / "megatron-ext-pretrain"
    command.write_text('#!/bin/sh\n[ "$RANK" = 0 ] && echo "$@"; exit 0\n')
    command.chmod(0o755)
    begun = begin((str(tmp_path / "bin" / "megatron-ext-launch"),), "megatron-ext-pretrain", "--seed", 3)
    out, said = begun.communicate(timeout=120)
    assert (begun.returncode, out, said) == (0, "--seed 3\n", "")
    status, lines = end(begin((str(tmp_path / "bin" / "megatron-ext-launch"),), "megatron-ext-pack"))
    assert (status, lines[-1]) == (2, "error: megatron-ext-pack: No such file or directory; check the path")


def test_a_torch_that_would_kill_a_save_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11's parser has the signals alone."""
    older = argparse.ArgumentParser()
    older.add_argument("--signals-to-handle")
    monkeypatch.setattr("torch.distributed.run.get_args_parser", lambda: older)
    with pytest.raises(UserError, match=r"whose torchrun has no --shutdown-timeout, needs 2\.12; start with torchrun"):
        start(["x.py"])
