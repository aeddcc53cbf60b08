"""An outsider's Llama repeats runs whose rotary angles are scaled, follow the window, or are missing in some layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import SmallData
from runs import RunResult, launch, relative, weight_error

from megatron_ext.checkpoint.pretrained import Pretrained
from parity.oracle import repeat

STEPS, LENGTH, TOLERANCE = 8, 256, 1e-5
WINDOWS = ["--window-start", "16", "--window-rate", "40", "--no-document-mask"]
BASES = ["--rotary-base", "50000", "--rope-window-bases", "60:100", "200:3000"]
WEIGHTED = ["--token-weighting", "unfrozen", "--short-context", "64"]
INTERLEAVED = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
NOPE = ["--no-rope-freq", "2"]
SCALED = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0, "max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def train(data: SmallData, folder: Path, processes: int, *flags: str) -> RunResult:
    return launch([*data.flags, "--seq-length", LENGTH, "--train-iters", STEPS, *WINDOWS, *flags], processes, folder)


def assert_repeated(run: RunResult) -> None:
    oracle = repeat(run.trajectory, run.series("learning_rate"))
    assert relative(run.series("lm_loss"), oracle.lm_loss) <= TOLERANCE
    assert relative(run.series("train_loss"), oracle.train_loss) <= TOLERANCE
    assert relative(run.series("grad_norm"), oracle.grad_norm) <= TOLERANCE
    error, name = weight_error(run.weights("final"), oracle.weights)
    assert error <= TOLERANCE, name


def test_a_checkpoint_on_the_way_has_the_base_of_its_last_window(small_data: SmallData, tmp_path: Path) -> None:
    run = train(small_data, tmp_path, 1, *BASES, "--save-interval", "4")
    checkpoints = [run.folder / "checkpoints" / f"iter_{step:07}" for step in (4, STEPS)]
    bases = [Pretrained.find(checkpoint).model.rotary_base for checkpoint in checkpoints]
    assert bases == [3000.0, 50000.0]  # of windows of 136 and 256 tokens


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        pytest.param(1, [*BASES, *NOPE], id="one process, every second layer NoPE", marks=pytest.mark.slow),
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
    assert_repeated(run)
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


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k != "yarn" else ()) for k in SCALED])
def test_scaled_as_transformers_scales(small_data: SmallData, tmp_path: Path, kind: str) -> None:
    """The outsider's model gets the scaling from this test, in transformers' own words."""
    theirs = dict(SCALED[kind])
    length = theirs.pop("max_position_embeddings", LENGTH)
    original = theirs.get("original_max_position_embeddings", length)
    flags = ["--rope-scaling", kind, "--rope-scaling-factor", str(theirs["factor"])]
    flags += ["--rope-original-length", str(original)] if kind != "linear" else []
    run = train(small_data, tmp_path / "run", 1, *flags)
    path = run.trajectory / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_theta", None)
    config["max_position_embeddings"] = int(length)
    config["rope_parameters"] = {"rope_type": kind, "rope_theta": 10_000.0} | theirs
    path.write_text(json.dumps(config))
    assert_repeated(run)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    path.write_text(json.dumps(config))
    plain = repeat(run.trajectory, run.series("learning_rate")[:1])
    assert relative(run.series("grad_norm")[:1], plain.grad_norm) > 10 * TOLERANCE


@pytest.mark.slow
def test_without_any_angles_only_the_mask_knows_the_order(small_data: SmallData, tmp_path: Path) -> None:
    """All layers NoPE: the base means nothing."""
    runs = [
        train(small_data, tmp_path / base, 1, "--no-rope-freq", "1", "--rotary-base", base) for base in ("50", "90000")
    ]
    assert runs[0].series("lm_loss") == runs[1].series("lm_loss")
    assert_repeated(runs[0])
