"""An outsider's Llama repeats runs whose rotary base follows the window, and those with layers without angles."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SmallData
from runs import RunResult, launch, relative

from megatron_ext.checkpoint.pretrained import Pretrained
from parity.oracle import repeat
from parity.test_oracle import assert_repeated

STEPS, LENGTH, TOLERANCE = 8, 256, 1e-5
WINDOWS = ["--window-start", "16", "--window-rate", "40", "--no-document-mask"]
BASES = ["--rotary-base", "50000", "--rope-window-bases", "60:100", "200:3000"]
WEIGHTED = ["--token-weighting", "unfrozen", "--short-context", "64"]
INTERLEAVED = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
NOPE = ["--no-rope-freq", "2"]


def train(data: SmallData, folder: Path, processes: int, *flags: str) -> RunResult:
    return launch([*data.flags, "--seq-length", LENGTH, "--train-iters", STEPS, *WINDOWS, *flags], processes, folder)


def test_a_checkpoint_on_the_way_has_the_base_of_its_last_window(small_data: SmallData, tmp_path: Path) -> None:
    run = train(small_data, tmp_path, 1, *BASES, "--save-interval", "4")
    checkpoints = [run.folder / "checkpoints" / f"iter_{step:07}" for step in (4, STEPS)]
    bases = [Pretrained.find(checkpoint).model.rotary_base for checkpoint in checkpoints]
    assert bases == [3000.0, 50000.0]  # of windows of 136 and 256 tokens


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        pytest.param(
            2,
            [*BASES, *NOPE, *WEIGHTED, "--pipeline-model-parallel-size", "2", "--recompute-granularity", "full"],
            id="pipeline, recompute, token weighting, NoPE",
        ),
        pytest.param(2, [*BASES, *NOPE, "--context-parallel-size", "2"], id="context parallel", marks=pytest.mark.slow),
        pytest.param(
            4,
            [*BASES, *NOPE, "--tensor-model-parallel-size", "2", *INTERLEAVED],
            id="interleaved pipeline, NoPE",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bases_that_follow_the_window(small_data: SmallData, tmp_path: Path, processes: int, flags: list[str]) -> None:
    run = train(small_data, tmp_path / "run", processes, *flags)
    windows = run.series("window")
    assert windows[0] <= 60 < windows[3] <= 200 < windows[-1]  # all three bases are used
    assert_repeated(run, repeat(run.trajectory, run.series("learning_rate")))
    fixed = repeat(run.trajectory, run.series("learning_rate"), bases=False)
    assert relative(run.series("grad_norm")[:1], fixed.grad_norm[:1]) > 100 * TOLERANCE


@pytest.mark.slow
def test_evaluation_takes_the_base_that_was_trained_with(small_data: SmallData, tmp_path: Path) -> None:
    """Stopped at a window whose base is 100, the model is evaluated as one whose base has always been 100."""
    same = ["--eval-interval", "4", "--eval-iters", "1", "--window-rate", "4"]
    table = train(small_data, tmp_path / "table", 1, *same, "--rotary-base", "5000", "--rope-window-bases", "60:100")
    plain = train(small_data, tmp_path / "plain", 1, *same, "--rotary-base", "100")
    other = train(small_data, tmp_path / "other", 1, *same, "--rotary-base", "5000")
    assert max(table.series("window")) <= 60
    losses = [[record["valid_loss"] for record in run.evaluations] for run in (table, plain, other)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
