"""A step done once more after updates that QK-Clip scaled, and with experts on one rank or spread over two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import SmallData
from launcher import Commands
from runs import RunResult, launch, relative

REPLAY = "tools/replay_step.py"
COMMON = (
    "--micro-batch-size 2 --global-batch-size 4 --seq-length 64 --hidden-size 64 --num-layers 2 "
    "--num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 96 --window-schedule constant --lr 1e-3"
)
CLIPPED = f"{COMMON} --qk-clip-threshold 0.05 --attention-health-interval 2 --train-iters 6 --save-interval 4"
MIXTRAL = (
    f"{COMMON} --num-experts 4 --moe-ffn-hidden-size 96 --moe-aux-loss-coeff 0.1 --train-iters 3 --lr-warmup-iters 1"
)
STEP = 5


@pytest.fixture(scope="module")
def clipped(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run that scales heads after steps 0, 2 and 4, and saves before step 4."""
    run = launch([*small_data.flags, *CLIPPED.split()], 1, tmp_path_factory.mktemp("clipped") / "run")
    assert [step for step, one in enumerate(run.metrics) if "attention_clipped" in one] == [0, 2, 4]
    assert all(sum(one["attention_clipped"]) > 0 for one in run.metrics[::2]), run.metrics
    return run


def losses(folder: Path) -> np.ndarray:
    """Of each token, from what a replay writes."""
    found: np.ndarray = np.load(folder / "losses.npz")["losses"]
    return found


def test_a_replay_clips_what_the_run_clipped(clipped: RunResult, alone: Commands, tmp_path: Path) -> None:
    """Its weights come from other checkpoints, through one clip or through all three, and are the run's."""
    whole = tmp_path / "run"
    shutil.copytree(clipped.folder, whole)
    shutil.rmtree(whole / "checkpoints")
    for run, name in ((clipped.folder, "saved"), (whole, "from the first")):
        (done,) = alone.attempt(REPLAY, run, STEP, "--output", tmp_path / name)
        assert done.status == 0, done.stdout + done.stderr
        made = json.loads((tmp_path / name / "replay.json").read_text())
        assert (made["checkpoint"] is None) == (name != "saved")
        assert relative([made["replayed"]["lm_loss"]], [clipped.series("lm_loss")[STEP]]) <= 1e-6
    np.testing.assert_allclose(losses(tmp_path / "saved"), losses(tmp_path / "from the first"), rtol=1e-6)


@pytest.mark.slow
def test_a_replay_that_does_not_clip_differs(clipped: RunResult, alone: Commands) -> None:
    (done,) = alone.attempt(
        REPLAY, clipped.folder, STEP, "--qk-clip-threshold", 1000, "--override", "qk_clip_threshold"
    )
    assert done.status == 1, done.stdout + done.stderr
    assert "NOT reproduced" in done.stdout


@pytest.mark.slow
def test_gradient_norms_of_experts_do_not_depend_on_their_ranks(
    small_data: SmallData, alone: Commands, tmp_path: Path
) -> None:
    """Part by part, of one process and of two with half of the experts each."""
    run = launch([*small_data.flags, *MIXTRAL.split()], 1, tmp_path / "run")
    found = []
    for commands, flags in ((alone, ()), (Commands(2), ("--expert-model-parallel-size", 2))):
        output = tmp_path / f"replay{len(found)}"
        flags = (*flags, "--tolerance", 1e-5, "--output", output)
        done = commands.attempt(REPLAY, run.folder, 2, *flags)
        assert {one.status for one in done} == {0}, done[0].stdout + done[0].stderr
        found.append(json.loads((output / "replay.json").read_text())["gradient_norms"])
    one, two = found
    assert list(one) == list(two)
    assert {"layer 1 MLP", "layer 2 MLP"} <= set(one)
    assert relative(list(two.values()), list(one.values())) <= 1e-5
