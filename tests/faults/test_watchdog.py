"""A rank that hangs, is stopped or dies: found within the stated time, and named in a line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SmallData
from launcher import ROOT, TIMEOUT_S, Commands, Running, clean_environment
from runs import CONFIG, read_jsonl

from megatron_ext import cli
from megatron_ext.run.signals import HUNG
from megatron_ext.run.watchdog import LostRankError, Report, lost_contact, name_blamed
from pretrain_skyladder import main

WAITS = Report(7, "step 41", "waits", "waits for others in all_reduce (megatron_ext/engine/step.py:308 finish)", 30.0)
BUSY = Report(7, "step 41", "busy", "is busy in megatron_ext/run/rows.py:33 read", 31.0)
DEVICE = replace(WAITS, standing="device", where="waits for its device (megatron_ext/engine/transfer.py:46 values)")
FAILED = replace(WAITS, standing="failed", where="MemoryError: 3 GiB")
LOST = replace(WAITS, standing="lost", where="has lost another rank")


def later(report: Report) -> Report:
    return report if report.ended else replace(report, renewed=report.renewed + 4)


def blamed(*reports: Report | None, silent: tuple[int, ...] = ()) -> str:
    after = {rank: one if one is None or rank in silent else later(one) for rank, one in enumerate(reports)}
    return name_blamed(dict(enumerate(reports)), after)


@pytest.mark.parametrize(
    ("reports", "silent", "said"),
    [
        ((WAITS, BUSY, WAITS), (), "rank 1 holds up the others: in step 41 it is busy in megatron_ext/run/rows.py:33 "),
        ((WAITS, BUSY, replace(BUSY, seconds=99.0)), (), "rank 2 holds up the others"),
        ((DEVICE, WAITS), (), "rank 0 holds up the others: in step 41 it waits for its device"),
        ((WAITS, WAITS, BUSY), (1,), "lost rank 1: killed or stopped, or its node is gone; its last report is of step"),
        ((WAITS, None), (), "lost rank 1: killed or stopped, or its node is gone; it has never reported"),
        ((LOST, BUSY, WAITS), (1,), "lost rank 1:"),
        ((WAITS,) * 9, tuple(range(2, 9)), "lost ranks 2, 3, 4, 5 and 3 more: killed"),
        ((LOST, FAILED, BUSY), (2,), "lost rank 1, which ended in step 41: MemoryError: 3 GiB"),
        ((LOST, LOST), (), "a connection between ranks broke"),
        ((WAITS, WAITS), (), "no rank is busy, each waits for the others: rank 1 waits for others in all_reduce"),
    ],
)
def test_who_is_to_blame(reports: tuple[Report | None, ...], silent: tuple[int, ...], said: str) -> None:
    assert blamed(*reports, silent=silent).startswith(said)


def test_only_the_errors_of_collectives_are_another_ranks() -> None:
    assert lost_contact(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"))
    wrapped = ValueError("plan failed")
    wrapped.__cause__ = RuntimeError("gloo/transport: Timed out waiting 1800ms")
    assert lost_contact(wrapped)
    assert not lost_contact(RuntimeError("shape mismatch"))
    assert not lost_contact(ValueError("gloo"))


ALONE = """
import sys, time
from pathlib import Path
from megatron_ext.run.watchdog import Watchdog

def read_a_disk_that_does_not_answer():
    time.sleep(60)

with Watchdog(0, 1, Path(sys.argv[1]), 2.4, {}) as watchdog:
    for step in range(8):
        watchdog.beat(f"step {step}")
        time.sleep(0.4)
    read_a_disk_that_does_not_answer()
"""


def test_a_process_without_others(tmp_path: Path) -> None:
    """Steps shorter than the limit pass, however many; then it ends with its status, its line and its stacks.

    torchrun gets the line too.
    """
    left = tmp_path / "error.json"
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    environment = clean_environment() | {"TORCHELASTIC_ERROR_FILE": str(left)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == HUNG, done.stderr
    stacks = tmp_path / "stacks" / "rank0.txt"
    assert re.fullmatch(
        r"error: rank 0 has not got on for 2 s in step 7 \(--watchdog-timeout 2\.4\): it is busy in <string>:7 "
        rf"read_a_disk_that_does_not_answer; the stacks of its threads are in {stacks}\n",
        done.stderr,
    ), done.stderr
    assert "in read_a_disk_that_does_not_answer" in stacks.read_text()
    assert done.stderr == f"error: {json.loads(left.read_text())['message']['message']}\n"


def test_torchrun_is_told_that_another_process_says_which_rank_is_lost(
    small_data: SmallData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(stages: object) -> int:
        raise LostRankError("another process says which rank is lost", said=True)

    left = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(left))
    monkeypatch.setattr("megatron_ext.run.stages.train_stages", lose)
    assert main([str(word) for word in (*CONFIG, *small_data.flags)]) == cli.FAILED
    assert capsys.readouterr().err == ""
    assert json.loads(left.read_text())["message"]["message"] == "another process says which rank is lost"


TRAINER = "benchmarks/soak_rank.py"
TINY = [*CONFIG, "--num-layers", 1, "--hidden-size", 32, "--ffn-hidden-size", 64, "--num-attention-heads", 2]
TINY += ["--num-query-groups", 2, "--seq-length", 64, "--window-start", 8, "--train-iters", 100_000]


def started(data: SmallData, run: Path, *flags: object) -> Running:
    """Two ranks, after some steps."""
    running = Commands(2).start(TRAINER, *TINY, *data.flags, *flags, "--save", run)
    running.wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) > 3)
    return running


def errors(running: Running, rank: int) -> list[str]:
    return [line for line in running.done()[rank].stderr.splitlines() if line.startswith("error: ")]


def test_a_stopped_rank_is_named(small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = started(small_data, run, "--watchdog-timeout", 6)
    running.signal(signal.SIGSTOP, 1)
    try:
        running.wait_for(lambda: running.alive() == [1])
        own, blames = errors(running, 0)
        assert re.match(
            r"error: rank 0 has not got on for \d+ s in step \d+ \(--watchdog-timeout 6\): it waits for others in ", own
        )
        assert blames.startswith("error: lost rank 1: killed or stopped, or its node is gone; its last report is of ")
        assert "distributed_c10d.py" in (run / "stacks" / "rank0.txt").read_text()
    finally:
        running.kill()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_stack(small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = started(small_data, run, "--watchdog-timeout", 6)
    running.signal(signal.SIGUSR2, 1)
    assert running.wait(TIMEOUT_S)
    said = errors(running, 0) + errors(running, 1)
    (blames,) = [line for line in said if "holds up the others" in line]
    assert blames.startswith("error: rank 1 holds up the others: in step ")
    assert "it waits for others in" in errors(running, 0)[0]
    assert "in hang" in (run / "stacks" / "rank1.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_is_named_and_takes_the_others_down(small_data: SmallData, tmp_path: Path, dead: int) -> None:
    """Rank 0 holds the store: without it the other one says just that."""
    running = started(small_data, tmp_path / "run")
    running.signal(signal.SIGKILL, dead)
    assert running.wait(60)
    assert running.statuses[1 - dead] == 1
    (line,) = errors(running, 1 - dead)
    named = "lost rank 1: killed or stopped" if dead == 1 else "rank 1 has lost rank 0: it no longer answers at "
    assert f"LostRankError: {named}" in line
