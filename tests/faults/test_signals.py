"""Stopped by a signal: saved, with the exit status and the file that a launch script reads."""

import asyncio
import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.checkpoint.folders import folder_name, locate
from megatron_ext.run.signals import StopRequest, signal_of
from tests.conftest import SmallData
from tests.launcher import TIMEOUT_S, Commands, Running, call, clean_environment, torchrun, wait_until
from tests.runs import CONFIG, TRAINER, read_jsonl

COMMON = [*CONFIG, "--seq-length", 64, "--train-iters", 1000, "--window-schedule", "constant"]


def wait_for_steps(running: Running, metrics: Path, steps: int) -> None:
    running.wait_for(lambda: len(read_jsonl(metrics)) >= steps)


def stopped(running: Running, number: signal.Signals, rank: int = 0) -> list[int | None]:
    """The exit statuses after a signal to one rank alone."""
    running.signal(number, rank)
    assert running.wait(TIMEOUT_S)
    return running.statuses


@pytest.mark.parametrize(
    ("processes", "number", "saving"),
    [
        (1, signal.SIGTERM, ("--async-save", "--save-interval", 1)),
        (1, signal.SIGINT, ()),
        (1, signal.SIGHUP, ()),
        (2, signal.SIGUSR1, ("--async-save", "--save-interval", 1)),
    ],
)
def test_the_last_step_is_saved_and_stopped_json_written(
    small_data: SmallData, tmp_path: Path, processes: int, number: signal.Signals, saving: tuple[object, ...]
) -> None:
    """The last rank alone has the signal; after SIGINT no launch script goes on."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "stopped.json").write_text("of an earlier run")
    running = Commands(processes).start(TRAINER, *COMMON, *small_data.flags, *saving, "--save", run)
    wait_for_steps(running, run / "metrics.jsonl", 2)
    assert not (run / "stopped.json").exists()
    status = 130 if number == signal.SIGINT else 85
    assert stopped(running, number, rank=processes - 1) == [status] * processes
    steps = len(read_jsonl(run / "metrics.jsonl"))
    assert locate(run).folder == run / "checkpoints" / folder_name(steps)
    if status == 85:
        record = json.loads((run / "stopped.json").read_text())
        assert record == {"signal": number.name, "exit_code": 85, "step": steps, "checkpoint": record["checkpoint"]}
        assert record["checkpoint"] == f"checkpoints/{folder_name(steps)}"
    else:
        assert not (run / "stopped.json").exists()


def test_without_a_folder_nothing_is_saved(small_data: SmallData, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    running = Commands().start(TRAINER, *COMMON, *small_data.flags, "--dump-trajectory", dump)
    running.wait_for((dump / "step_000001.npz").exists)
    assert stopped(running, signal.SIGTERM) == [143]
    assert "nothing saved: no --save folder" in running.done()[0].stderr


def test_a_run_in_stages_writes_stopped_json_in_its_own_folder(small_data: SmallData, tmp_path: Path) -> None:
    config = yaml.safe_load(Path(CONFIG[1]).read_text()) | {
        "stages": [{"name": "short", "training": {"train_iters": 1000}}, {"name": "long"}]
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "a run"
    flags = ["--config", tmp_path / "run.yaml", "--no-tensorboard", *small_data.flags, "--seq-length", 64]
    running = Commands().start(TRAINER, *flags, "--window-schedule", "constant", "--save", run)
    wait_for_steps(running, run / "short" / "metrics.jsonl", 1)
    assert stopped(running, signal.SIGUSR1) == [85]
    stopped_json = json.loads((run / "stopped.json").read_text())
    assert stopped_json["checkpoint"] == f"short/checkpoints/{folder_name(stopped_json['step'])}"
    assert (run / stopped_json["checkpoint"]).is_dir()
    assert f"{run / stopped_json['checkpoint']}; --load '{run}' continues from there" in running.done()[0].stderr


def test_an_interrupted_validation_is_repeated_on_resume(small_data: SmallData, tmp_path: Path) -> None:
    """The checkpoint is saved first; a resumed run, also with another number of processes, validates at its step."""
    run = tmp_path / "run"
    flags = [*COMMON, *small_data.flags, "--train-iters", 3, "--eval-interval", 3, "--lr-warmup-iters", 0]
    flags += ["--save", run]
    running = Commands().start(TRAINER, *flags, "--eval-iters", 300)
    wait_for_steps(running, run / "metrics.jsonl", 3)
    assert stopped(running, signal.SIGUSR1) == [85]
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0]
    assert locate(run).folder == run / "checkpoints" / folder_name(3)
    again, _ = Commands(2).run(TRAINER, *flags, "--eval-iters", 1, "--load", run)
    assert [record["step"] for record in read_jsonl(run / "evaluation.jsonl")] == [0, 3]
    assert "checkpoint of another layout: random states start anew" in again.stderr
    assert len(read_jsonl(run / "metrics.jsonl")) == 3


def test_a_persons_signal_counts_more_than_any_other_processs() -> None:
    """Processes agree on the largest number: the job must not start again if any of them got a Ctrl-C."""
    priorities = []
    for number in (signal.SIGINT, signal.SIGTERM, 0, max(signal.Signals)):
        request = StopRequest(None)
        request.signal = number
        priorities.append(request.priority)
        assert signal_of(request.priority) == number
    assert max(priorities) == priorities[0]
    assert min(priorities) == 0


def unrequested(rank: int) -> list[str]:
    """The signals that end a process, can be caught and are no fault of its own, but that StopRequest lets pass."""
    faults = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
    as_errors = {"SIGPIPE", "SIGXFSZ"}  # Python ignores them: the write fails
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}  # by nohup
    unknown = []
    with StopRequest(None) as request:
        request.listen()
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP} - ignored:
            if number.name in faults | as_errors or not ends_a_process(number):
                continue
            request.signal = 0
            signal.raise_signal(number)
            if not wait_until(lambda number=number: request.signal == number, 10):
                unknown.append(number.name)
    return unknown


def ends_a_process(number: signal.Signals) -> bool:
    child = os.fork()
    if child == 0:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_every_signal_that_ends_a_process_and_can_be_caught_is_a_request_to_stop() -> None:
    assert call(unrequested, 1, group=False) == [[]]


def sleeping(begun: Any) -> None:
    begun.set()
    time.sleep(60)


def terminated_child(rank: int) -> tuple[int | None, int]:
    with StopRequest(None) as request:
        request.listen()
        begun = multiprocessing.get_context("fork").Event()
        child = multiprocessing.get_context("fork").Process(target=sleeping, args=(begun,))
        child.start()
        begun.wait(60)
        child.terminate()
        child.join(10)
        time.sleep(0.5)
        return child.exitcode, request.signal


def test_a_child_that_is_terminated_stops_no_run() -> None:
    """Libraries end workers that they forked by SIGTERM."""
    assert call(terminated_child, 1, group=False) == [(-signal.SIGTERM, 0)]


def test_an_ignored_sighup_stays_ignored() -> None:
    """The command nohup ignores it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(None) as request:
            request.listen()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def other_handlers(rank: int) -> int:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.signal(signal.SIGRTMIN, lambda *_: None)
    with StopRequest(None) as request:
        request.listen()
        signal.raise_signal(signal.SIGRTMIN)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.5)
        return request.signal


def test_a_signal_that_other_code_handles_stops_no_run() -> None:
    assert call(other_handlers, 1, group=False) == [0]


def after_an_event_loop(rank: int) -> int:
    async def handle_a_signal() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, print)

    with StopRequest(None) as request:
        request.listen()
        asyncio.run(handle_a_signal())
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: request.signal != 0, 5)
        return request.signal


def test_a_request_is_heard_after_asyncio_took_the_wakeup_descriptor() -> None:
    assert call(after_an_event_loop, 1, group=False) == [signal.SIGTERM]


def interrupted_then_terminated(rank: int) -> int:
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    with StopRequest(None) as request:
        request.listen()
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.5)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)
        return request.signal


def test_a_sigterm_after_a_ctrl_c_leaves_the_run_to_save() -> None:
    """A preemption sends one, and so does torchrun for its second Ctrl-C; nothing starts the run again."""
    assert call(interrupted_then_terminated, 1, group=False) == [signal.SIGINT]


def test_a_terminal_that_is_closed_loses_no_step(small_data: SmallData, tmp_path: Path) -> None:
    """The trainer gets SIGHUP, and every line that it then prints is an error."""
    run = tmp_path / "run"
    terminal, end = os.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(end, termios.TIOCSCTTY, 0)

    command = [sys.executable, TRAINER, *map(str, [*COMMON, *small_data.flags, "--save", run])]
    pipes = {"stdin": end, "stdout": end, "stderr": end}
    trainer = subprocess.Popen(
        command, env=clean_environment(), start_new_session=True, preexec_fn=take_terminal, **pipes
    )
    os.close(end)
    os.set_blocking(terminal, False)

    def trains() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)  # a terminal that nobody reads is full after a few lines
        return len(read_jsonl(run / "metrics.jsonl")) >= 2 or trainer.poll() is not None

    try:
        wait_until(trains, TIMEOUT_S)
        os.close(terminal)
        assert trainer.wait(TIMEOUT_S) == 85
    finally:
        trainer.kill()
    steps = len(read_jsonl(run / "metrics.jsonl"))
    assert json.loads((run / "stopped.json").read_text())["signal"] == "SIGHUP"
    assert locate(run).folder == run / "checkpoints" / folder_name(steps)
    assert read_jsonl(run / "history.jsonl")[-1]["how"] == "stopped by SIGHUP"


def in_a_long_step(small_data: SmallData, run: Path) -> Running:
    running = torchrun(1, "tests/faults/long_step.py", *COMMON, *small_data.flags, "--save", run)
    running.wait_for(lambda: "the long step begins" in running.done()[0].stderr)
    return running


def signal_and_read(running: Running, number: signal.Signals) -> None:
    """Send a signal, and wait until the run has acknowledged it."""
    running.signal(number)
    running.wait_for(lambda: f"{number.name}: the run saves and stops after" in running.done()[0].stderr)


@pytest.mark.slow
def test_a_long_step_acknowledges_signals_and_a_second_ctrl_c_ends_it(small_data: SmallData, tmp_path: Path) -> None:
    running = in_a_long_step(small_data, tmp_path / "run")
    signal_and_read(running, signal.SIGTERM)
    signal_and_read(running, signal.SIGINT)
    running.signal(signal.SIGINT)  # the same keystroke, passed on by a launcher
    time.sleep(2)
    assert running.alive()
    running.signal(signal.SIGINT)
    (done,) = running.finish()
    assert done.status == 130
    assert "ended by a second Ctrl-C, without saving" in done.stderr
    assert not locate(tmp_path / "run")
