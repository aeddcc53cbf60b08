"""A rank that makes no progress ends with its status, a line and its stacks; a slow save or load does not."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SmallData
from launcher import ROOT, TIMEOUT_S, Commands, Running, clean_environment
from runs import CONFIG, read_jsonl

from megatron_ext.checkpoint.folders import saved_steps
from megatron_ext.run.signals import HUNG

HANGS = """
import sys, time
from pathlib import Path
from megatron_ext import heartbeat
from megatron_ext.run.watchdog import Watchdog

def read_a_disk_that_does_not_answer():
    time.sleep(60)

with Watchdog(0, Path(sys.argv[1]), 2.4):
    for step in range(8):
        heartbeat.beat(f"step {step}")
        time.sleep(0.4)
    if len(sys.argv) > 2:
        class Broken:
            def write(self, text):
                raise BrokenPipeError
            flush = write
        sys.stderr = Broken()
    read_a_disk_that_does_not_answer()
"""


def hang(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HANGS, str(folder), *words]
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_process_that_hangs(tmp_path: Path) -> None:
    """Any number of steps shorter than the limit pass."""
    done = hang(tmp_path)
    assert done.returncode == HUNG, done.stderr
    stacks = tmp_path / "stacks" / "rank0.txt"
    assert re.fullmatch(
        r"error: rank 0 made no progress for \d s in step 7 \(--watchdog-timeout 2\.4\); "
        rf"the stacks of its threads are in {stacks}\n",
        done.stderr,
    ), done.stderr
    assert "in read_a_disk_that_does_not_answer" in stacks.read_text()


@pytest.mark.parametrize("words", [("broken stderr",), ("broken stderr", "and stacks cannot be written")])
def test_a_report_that_fails_does_not_keep_the_process_alive(tmp_path: Path, words: tuple[str, ...]) -> None:
    if len(words) > 1:
        (tmp_path / "stacks").write_text("no folder")
    assert hang(tmp_path, *words).returncode == HUNG


TRAINER = "benchmarks/soak_rank.py"
TINY = [*CONFIG, "--num-layers", 1, "--hidden-size", 32, "--ffn-hidden-size", 64, "--num-attention-heads", 2]
TINY += ["--num-query-groups", 2, "--seq-length", 64, "--window-start", 8]


@pytest.mark.parametrize("saving", [(), pytest.param(("--async-save",), marks=pytest.mark.slow)])
def test_saving_and_loading_may_take_longer_than_the_limit(
    small_data: SmallData, tmp_path: Path, saving: tuple[str, ...]
) -> None:
    """Rank 0 writes a tensor in 0.4 s: the other waits, longer than the limit of 3 s. Both read as slowly."""
    flags = [*TINY, *small_data.flags, "--watchdog-timeout", 3, "--save", tmp_path, *saving]
    flags += ["--window-schedule", "constant", "--lr-decay-iters", 9]
    script = "tests/faults/slow_tensors.py"
    Commands(2).run(script, *flags, "--train-iters", 2)
    Commands(2).run(script, *flags, "--train-iters", 3, "--load", tmp_path)
    assert saved_steps(tmp_path) == [2, 3]


def started(data: SmallData, run: Path) -> Running:
    """Two ranks, after some steps."""
    flags = [*data.flags, "--train-iters", 100_000, "--watchdog-timeout", 6, "--save", run]
    running = Commands(2).start(TRAINER, *TINY, *flags)
    running.wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) > 3)
    return running


def test_a_stopped_rank_ends_the_other(small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = started(small_data, run)
    running.signal(signal.SIGSTOP, 1)
    try:
        running.wait_for(lambda: running.alive() == [1])
        assert "error: rank 0 made no progress for" in running.done()[0].stderr
        assert "distributed_c10d.py" in (run / "stacks" / "rank0.txt").read_text()
    finally:
        running.kill()


@pytest.mark.slow
def test_a_rank_that_hangs_leaves_its_stack(small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = started(small_data, run)
    running.signal(signal.SIGUSR2, 1)
    assert running.wait(TIMEOUT_S)
    assert "in hang" in (run / "stacks" / "rank1.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_takes_the_other_down(small_data: SmallData, tmp_path: Path, dead: int) -> None:
    running = started(small_data, tmp_path / "run")
    running.signal(signal.SIGKILL, dead)
    assert running.wait(60)
    assert running.statuses[1 - dead] not in (0, None)
