"""tools/launch.py with real processes: the exit status is the first one's, and its line is the last."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import ROOT, clean_environment

WORKER = """
import os, signal, sys, time
from megatron_ext.command_line import command
from megatron_ext.errors import UserError

@command
def main(argv):
    rank = int(os.environ["RANK"])
    if argv == ["refuse"]:  # the one that speaks is the later one
        time.sleep(0 if rank else 1.5)
        raise UserError("lr: got -1, needs > 0")
    if argv == ["fault"] and rank:
        raise RuntimeError("no luck")
    if argv == ["die"] and rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if argv == ["saved"]:
        return 85
    if argv == ["wait"]:
        signal.signal(signal.SIGUSR1, lambda *_: (print("saving", rank, flush=True), sys.exit(85)))
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
            "rank 1 ended with exit status 1: RuntimeError: no luck; no fault of the input: ",
        ),
        ("die", 137, "rank 1 was ended by SIGKILL"),
        ("saved", 85, "rank 0 ended with exit status 85"),
    ],
)
def test_the_exit_status_is_that_of_the_first_to_end(worker: Path, does: str, status: int, last: str) -> None:
    got, said = end(begin(LAUNCH, worker, does))
    assert got == status
    assert said[-1].startswith(last)
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
    begin_s = time.monotonic()
    out, said = begun.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["saving 0", "saving 1"]
    assert begun.returncode == 128 + signal.SIGUSR1
    assert said.splitlines()[-1] == "stopped by SIGUSR1"
    assert time.monotonic() - begin_s < 25  # nobody waited for the end of the ten minutes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-restarts", "many", "x.py"], "error: --max_restarts: got 'many', needs a whole number"),
        (["--nnodes", "none", "x.py"], "error: "),
        ([], "error: training_script, training_script_args: got nothing, needs a value"),
    ],
)
def test_wrong_flags_of_the_launcher_are_one_line(words: list[str], said: str) -> None:
    status, lines = end(begin(LAUNCH, *words))
    assert (status, len(lines)) == (2, 1), lines
    assert lines[0].startswith(said)
