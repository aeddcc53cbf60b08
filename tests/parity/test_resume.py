"""A run stopped by a signal and resumed leaves the trace of one that never was; faults/test_kills.py kills it."""

import signal
import time
from pathlib import Path

import pytest

from megatron_ext.checkpoint.folders import saved_steps
from tests.conftest import SmallData
from tests.launcher import Running
from tests.runs import finish, launch, read_jsonl, start, weight_error, without_times

STEPS = 12
WINDOW = ["--window-start", "7", "--window-rate", "9", "--document-mask"]
EVALUATION = ["--eval-interval", "4", "--eval-iters", "1"]
COMMON = ["--seq-length", "64", "--train-iters", str(STEPS), *WINDOW, *EVALUATION]
EXPOSURE = ("--token-weighting", "unfrozen", "--weight-score", "exposure", "--weight-post", "none")
DP2 = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", *EXPOSURE)


def wait_for_steps(running: Running, folder: Path, since: float, steps: int) -> None:
    """Wait until this command, started at the time `since`, has done `steps` steps, the loaded ones included."""
    metrics = folder / "metrics.jsonl"

    def done() -> bool:
        cut_back = metrics.exists() and metrics.stat().st_mtime > since  # to the checkpoint, by this process
        return cut_back and len(read_jsonl(metrics)) >= steps

    running.wait_for(done)


@pytest.mark.slow
def test_stopped_and_resumed(small_data: SmallData, tmp_path: Path) -> None:
    """Signals to one worker or to torchrun, which always exits with 1, but stopped.json tells.

    Each step once; every metric but the times, every evaluation and the final weights, bit for bit.
    What a process alone exits with: faults/test_signals.py.
    """
    folder = tmp_path / "run"
    flags = [*small_data.flags, *COMMON, *DP2]
    # starts the run and continues it
    command = [*flags, "--load", folder, "--load-if-present", "--dump-trajectory", folder / "trajectory"]
    for number, to_torchrun in ((signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)):
        since = time.time()
        loaded = max(saved_steps(folder), default=0)
        process = start(command, 2, folder)
        wait_for_steps(process, folder, since, loaded + 2)
        (process.agent if to_torchrun else process.workers()[-1]).send_signal(number)
        stopped = finish(process, folder)
        steps = len(stopped.metrics)
        assert stopped.returncode == 1, stopped.stderr
        facts = {"signal": number.name, "exit_code": 85, "step": steps, "checkpoint": f"checkpoints/iter_{steps:07d}"}
        assert read_jsonl(folder / "stopped.json") == ([] if number == signal.SIGINT else [facts])
        assert loaded + 2 <= steps < STEPS
        assert max(saved_steps(folder)) == steps
        assert f"stopped by a signal; saved after {steps} steps" in stopped.stdout + stopped.stderr
    result = finish(start(command, 2, folder), folder)
    assert result.returncode == 0, result.stderr
    assert not (folder / "stopped.json").exists()
    whole = launch(flags, 2, tmp_path / "whole")
    assert result.series("step") == list(range(STEPS))
    assert without_times(result.metrics) == without_times(whole.metrics)
    assert [record["step"] for record in result.evaluations] == [0, 4, 8, 12]
    assert result.evaluations == whole.evaluations
    assert weight_error(result.weights("final"), whole.weights("final"))[0] == 0
