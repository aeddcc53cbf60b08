"""SIGKILL at random moments of a run that saves every step: it always continues from a complete checkpoint."""

import random
from pathlib import Path

import pytest

from megatron_ext.checkpoint.folders import folder_name, locate, saved_steps
from megatron_ext.checkpoint.manifest import Manifest
from tests.conftest import SmallData, slow_but
from tests.launcher import TIMEOUT_S, Commands, Running, wait_until
from tests.runs import CONFIG, TRAINER, read_jsonl, without_times

STEPS = 16
COMMON = [*CONFIG, "--seq-length", 64, "--global-batch-size", 4, "--train-iters", STEPS, "--window-start", 7]
COMMON += ["--save-interval", 1, "--hidden-dropout", 0.1]  # which needs the random states of the checkpoint
COMMON += ["--eval-interval", 8, "--eval-iters", 1]
DP2 = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def checksums(run: Path, step: int) -> dict[str, str]:
    """Return the checksums of the tensors that a checkpoint holds."""
    files = Manifest.read(run / "checkpoints" / folder_name(step)).files
    return {name: facts.sha256 for name, facts in files.items() if name.endswith(".safetensors")}


def trace(run: Path) -> tuple[list[dict], list[dict], dict[str, str]]:
    """The metrics without times, the evaluations, and the checksums of the last checkpoint's tensors."""
    metrics, evaluations = (read_jsonl(run / f"{name}.jsonl") for name in ("metrics", "evaluation"))
    return without_times(metrics), evaluations, checksums(run, STEPS)


def assert_complete(run: Path) -> None:
    """Every folder with a checkpoint's name has all its files with their checksums; the pointer names one."""
    for step in saved_steps(run):
        folder = run / "checkpoints" / folder_name(step)
        manifest = Manifest.read(folder)
        manifest.check_files(folder, manifest.files, content=True)
        assert manifest.step == step
    if saved_steps(run):
        assert locate(run) is not None


def wait_at_random(running: Running, run: Path, chance: random.Random) -> bool:
    """Wait for some steps of this process and a part of the time of two; return whether the run has ended.

    One in eight is not waited for that long: it is killed while it starts or loads.
    """
    metrics = run / "metrics.jsonl"
    seconds = max([record["step_time_s"] for record in read_jsonl(metrics)[-5:]], default=0.2)
    if chance.random() < 1 / 8:
        return running.wait(chance.uniform(0, 10 * seconds))
    before = metrics.stat() if metrics.exists() else None

    def begun() -> bool:
        """It cuts the file back first."""
        now = metrics.stat() if metrics.exists() else None
        return now is not None and not (before and now.st_ino == before.st_ino and now.st_size >= before.st_size)

    wait_until(lambda: begun() or running.wait(0), TIMEOUT_S)
    wanted = len(read_jsonl(metrics)) + chance.randint(1, 4)
    wait_until(lambda: len(read_jsonl(metrics)) >= wanted or running.wait(0), TIMEOUT_S)
    return running.wait(chance.uniform(0, 2 * seconds))


KEEP = ("--async-save", "--keep-last", 2)
CASES = {
    "async, 3 kills": (1, (), KEEP, 3),
    "sync, 25 kills": (1, (), (), 25),
    "async, 25 kills": (1, (), KEEP, 25),
    "dp2 async, 10 kills": (2, DP2, ("--async-save",), 10),
}


@pytest.mark.parametrize("case", slow_but(["async, 3 kills"], CASES))
@pytest.mark.timeout(3600)
def test_killed_at_random_moments(small_data: SmallData, tmp_path: Path, case: str) -> None:
    processes, layout, saving, kills = CASES[case]
    whole = tmp_path / "whole"
    Commands(processes).run(TRAINER, *COMMON, *small_data.flags, *layout, "--save", whole)
    chance = random.Random(case)
    done = rounds = 0
    while done < kills or not rounds:
        run = tmp_path / f"run{rounds}"
        command = [*COMMON, *small_data.flags, *layout, *saving, "--save", run, "--load", run, "--load-if-present"]
        ended = False
        while not ended:
            running = Commands(processes).start(TRAINER, *command)
            last = done == kills
            ended = running.wait(TIMEOUT_S) if last else wait_at_random(running, run, chance)
            if ended:
                assert running.statuses == [0] * processes, running.words()
            else:
                running.kill()
                assert not last, "the run without a kill hangs"
                done += 1
                assert_complete(run)
        assert trace(run) == trace(whole)
        assert not list(run.glob("checkpoints/*.incomplete"))
        assert_complete(run)
        rounds += 1
