"""A rank that makes no progress ends with its status, a line and its stacks; a slow save or load does not."""

import multiprocessing
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext import heartbeat
from megatron_ext.checkpoint.folders import saved_steps
from megatron_ext.engine import compat
from megatron_ext.run.signals import HUNG
from megatron_ext.run.watchdog import Watchdog
from tests.conftest import SmallData
from tests.launcher import TIMEOUT_S, Commands, Running
from tests.runs import CONFIG, TRAINER, read_jsonl


def read_a_disk_that_does_not_answer() -> None:
    time.sleep(60)


def hang(folder: Path, steps: int) -> None:
    """Do some steps, then what takes longer, and hang; stderr is a file of `folder`, or closed if there is no step."""
    sys.stderr = (folder / "stderr").open("w")
    if not steps:
        sys.stderr.close()
    with Watchdog(0, folder, 1.5):
        for step in range(steps):
            heartbeat.beat(f"step {step}")
            time.sleep(0.3)
        with heartbeat.limit(False):
            time.sleep(2)
        heartbeat.beat("step 7")
        read_a_disk_that_does_not_answer()


def exit_status(folder: Path, steps: int) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=hang, args=(folder, steps))
    process.start()
    process.join(TIMEOUT_S)
    return process.exitcode


def test_a_process_that_hangs(tmp_path: Path) -> None:
    """Any number of steps shorter than the limit pass; a report that fails does not keep the process alive."""
    assert exit_status(tmp_path, 7) == HUNG
    message = (tmp_path / "stderr").read_text()
    stacks = tmp_path / "stacks" / "rank0.txt"
    assert message.startswith("error: rank 0 made no progress for ")
    assert f"in step 7 (--watchdog-timeout 1.5); the stacks of its threads are in {stacks}\n" in message
    assert "in read_a_disk_that_does_not_answer" in stacks.read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "stacks").write_text("no folder")
    assert exit_status(tmp_path / "other", 0) == HUNG


def test_the_dump_is_of_nccls_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo has a recorder of its own, which is empty under NCCL."""
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"collectives", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for backend, wanted in (("gloo", []), ("nccl", [b"collectives"])):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        compat.dump_flight_recorder(tmp_path / backend)
        assert [path.read_bytes() for path in tmp_path.glob(backend)] == wanted


TINY = [*CONFIG, "--num-layers", 1, "--hidden-size", 32, "--ffn-hidden-size", 64, "--num-attention-heads", 2]
TINY += ["--num-query-groups", 2, "--seq-length", 64, "--window-start", 8]


@pytest.mark.parametrize("saving", [(), pytest.param(("--async-save",), marks=pytest.mark.slow)])
def test_saving_and_loading_may_take_longer(small_data: SmallData, tmp_path: Path, saving: tuple[str, ...]) -> None:
    """Rank 0 writes a tensor in 0.1 s: the other waits, longer than the limit of 2 s. Both read as slowly."""
    flags = [*TINY, *small_data.flags, "--watchdog-timeout", 2, "--save", tmp_path, *saving]
    flags += ["--window-schedule", "constant", "--lr-decay-iters", 9]
    Commands(2).run(TRAINER, *flags, "--train-iters", 1)
    began = time.monotonic()
    Commands(2).run("tests/faults/slow_tensors.py", *flags, "--train-iters", 2, "--load", tmp_path)
    assert time.monotonic() - began > 2 * 2
    assert saved_steps(tmp_path) == [1, 2]


def test_a_step_may_take_longer(alone: Commands, small_data: SmallData) -> None:
    """Both passes of five layers take longer than the limit of 2 s, but no layer does."""
    flags = [*TINY, *small_data.flags, "--num-layers", 5, "--train-iters", 1, "--lr-warmup-iters", 0]
    flags += ["--global-batch-size", 1, "--micro-batch-size", 1, "--watchdog-timeout", 2]
    alone.run("tests/faults/slow_layers.py", *flags)


def started(data: SmallData, run: Path) -> Running:
    flags = [*data.flags, "--train-iters", 100_000, "--watchdog-timeout", 3, "--save", run]
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
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_takes_the_other_down(small_data: SmallData, tmp_path: Path, dead: int) -> None:
    running = started(small_data, tmp_path / "run")
    running.signal(signal.SIGKILL, dead)
    assert running.wait(60)
    assert running.statuses[1 - dead] not in (0, None)
