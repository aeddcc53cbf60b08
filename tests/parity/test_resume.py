"""A run stopped by a signal and resumed leaves the trace of one that never was; faults/test_kills.py kills it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SmallData
from tests.launcher import Commands, Running
from tests.runs import CONFIG, RunResult, finish, launch, read_jsonl, refusal, start, weight_error, without_times

STEPS = 12
WINDOW = ["--window-start", "7", "--window-rate", "9", "--document-mask"]
EVALUATION = ["--eval-interval", "4", "--eval-iters", "1"]
COMMON = ["--seq-length", "64", "--train-iters", str(STEPS), *WINDOW, *EVALUATION]
EXPOSURE = ("--token-weighting", "unfrozen", "--weight-score", "exposure", "--weight-post", "none")
DP2 = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", *EXPOSURE)


def resuming(data: SmallData, folder: Path, *flags: object) -> list[object]:
    """The command that starts a run and that continues it: always the same."""
    dump = ["--dump-trajectory", folder / "trajectory"]
    return [*data.flags, *COMMON, *flags, "--load", folder, "--load-if-present", *dump]


def wait_for_steps(running: Running, folder: Path, since: float, steps: int) -> None:
    """Wait until this command, started at the time `since`, has done `steps` steps, the loaded ones included."""
    metrics = folder / "metrics.jsonl"

    def done() -> bool:
        cut_back = metrics.exists() and metrics.stat().st_mtime > since  # to the checkpoint, by this process
        return cut_back and len(read_jsonl(metrics)) >= steps

    running.wait_for(done)


def saved_steps(folder: Path) -> int:
    pointer = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(pointer.read_text()) if pointer.exists() else 0


def assert_uninterrupted(resumed: RunResult, whole: RunResult) -> None:
    """Each step once; every metric but the times, every evaluation and the final weights, bit for bit."""
    assert resumed.series("step") == list(range(STEPS))
    assert without_times(resumed.metrics) == without_times(whole.metrics)
    assert [record["step"] for record in resumed.evaluations] == [0, 4, 8, 12]
    assert resumed.evaluations == whole.evaluations
    assert weight_error(resumed.weights("final"), whole.weights("final"))[0] == 0


@pytest.fixture(scope="module")
def wholes(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunResult]:
    """The uninterrupted run of a layout, made once."""
    made: dict[tuple[object, ...], RunResult] = {}

    def whole(processes: int, *flags: object) -> RunResult:
        if (processes, *flags) not in made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            made[(processes, *flags)] = launch([*small_data.flags, *COMMON, *flags], processes, folder)
        return made[(processes, *flags)]

    return whole


Wholes = Callable[..., RunResult]


@pytest.mark.slow
def test_stopped_and_resumed(small_data: SmallData, wholes: Wholes, tmp_path: Path) -> None:
    """Signals to one worker or to torchrun, which always exits with 1, but stopped.json tells.

    What a process alone exits with: faults/test_signals.py.
    """
    folder = tmp_path / "run"
    command = resuming(small_data, folder, *DP2)
    for number, to_torchrun in ((signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)):
        since, loaded = time.time(), saved_steps(folder)
        process = start(command, 2, folder)
        wait_for_steps(process, folder, since, loaded + 2)
        (process.agent if to_torchrun else process.workers()[-1]).send_signal(number)
        stopped = finish(process, folder)
        steps = len(stopped.metrics)
        assert stopped.returncode == 1, stopped.stderr
        facts = {"signal": number.name, "exit_code": 85, "step": steps, "checkpoint": f"checkpoints/iter_{steps:07d}"}
        assert read_jsonl(folder / "stopped.json") == ([] if number == signal.SIGINT else [facts])
        assert loaded + 2 <= steps < STEPS
        assert saved_steps(folder) == steps
        assert f"stopped by a signal; saved after {steps} steps" in stopped.stdout + stopped.stderr
    result = finish(start(command, 2, folder), folder)
    assert result.returncode == 0, result.stderr
    assert not (folder / "stopped.json").exists()
    assert_uninterrupted(result, wholes(2, *DP2))


def refused(alone: Commands, *flags: object) -> str:
    return refusal(alone.attempt("pretrain_skyladder.py", *CONFIG, *flags)[0])


def test_load_without_a_checkpoint_is_refused(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = refused(alone, *small_data.flags, *COMMON, "--load", run, "--save", run)
    assert line.startswith(f"load: got {run}, which holds no checkpoint")
    assert "--load-if-present" in line
    assert not run.exists()


def test_saving_onto_another_run_is_refused(alone: Commands, small_data: SmallData, wholes: Wholes) -> None:
    folder = wholes(1).folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    line = refused(alone, *small_data.flags, *COMMON, "--save", folder)
    assert line.startswith(f"save: got {folder}, which holds the checkpoints of another run")
    assert f"--load {folder}" in line
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
