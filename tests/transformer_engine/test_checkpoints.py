"""Checkpoints of Transformer Engine's layers continue without them, the other way round, and in fp8."""

from pathlib import Path

import pytest

from tests.conftest import SmallData
from tests.launcher import call
from tests.parity import test_layouts as layouts
from tests.parity.test_layouts import TOLERANCE
from tests.runs import CONFIG, Launched, RunResult, relative, weight_error
from tests.transformer_engine import SERVER
from tests.transformer_engine.cuda import change

COMMON = [
    "--seq-length",
    "64",
    "--document-mask",
    "--lr-warmup-iters",
    "1",
    "--train-iters",
    "4",
    "--save-interval",
    "2",
]
CUDA = ["--device", "cuda", "--attention-backend", "reference"]
MODELS = {
    "norms of queries and keys": (layouts.QWEN3, ""),
    "dots1": (layouts.DOTS1, "--moe-grouped-gemm"),  # under Transformer Engine alone
}


def load(run: RunResult) -> list[object]:
    return ["--load", run.folder / "checkpoints" / "iter_0000002"]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_continues_with_and_without_transformer_engine(launched: Launched, emulated: Launched, name: str) -> None:
    model, grouped = MODELS[name]
    flags = [*COMMON, *model.split(), layouts.DISTRIBUTED]
    cuda = [*flags, *CUDA, *grouped.split()]
    whole, emulated_whole = launched(flags, 1), emulated(cuda, 1)
    continued = [launched([*flags, *load(emulated_whole)], 1), emulated([*cuda, *load(whole)], 1)]
    for run in continued:
        assert run.series("step") == [2, 3]
        assert relative(run.series("lm_loss"), whole.series("lm_loss")[2:]) <= TOLERANCE
        error, worst = weight_error(run.weights("final"), whole.weights("final"))
        assert error <= TOLERANCE, worst


def train(rank: int, flags: list[str], capability: tuple[int, int]) -> None:
    """Run the trainer on GPUs of a compute capability."""
    from pretrain_skyladder import main

    change(capability=capability)
    assert main(flags) == 0


@pytest.mark.parametrize(("recipe", "capability"), [("tensorwise", (9, 0)), ("blockwise", (9, 0)), ("mxfp8", (10, 0))])
def test_a_run_in_fp8_continues_exactly(
    small_data: SmallData, tmp_path: Path, recipe: str, capability: tuple[int, int]
) -> None:
    """All of Transformer Engine's Python code runs for each recipe; products are as exact as in bf16."""
    flags = [*CONFIG, *small_data.flags, *COMMON, *CUDA, "--bf16"]
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", recipe]
    runs = {"bf16": [], "whole": fp8, "continued": [*fp8, "--load", f"{tmp_path}/whole/checkpoints/iter_0000002"]}
    for name, more in runs.items():
        folder = tmp_path / name
        dump = ["--save", str(folder), "--dump-trajectory", str(folder / "trajectory")]
        call(train, 1, [*flags, *more, *dump], capability, group=False, server=SERVER)
    bf16, whole, continued = (RunResult(tmp_path / name, 0, "", "") for name in runs)
    assert weight_error(continued.weights("final"), whole.weights("final"))[0] == 0
    assert relative(whole.series("lm_loss"), bf16.series("lm_loss")) <= 1e-2
