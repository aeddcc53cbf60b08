"""Transformer Engine's layers and optimizer train the same model as Megatron-Core's on a CPU, in every layout."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_ext.engine import compat
from megatron_ext.errors import UserError
from tests.conftest import SmallData
from tests.launcher import call
from tests.parity import test_layouts as layouts
from tests.parity.test_layouts import (
    COMMON,
    LINEAR,
    Layout,
    assert_same_rows,
    assert_same_training,
    assert_window_is_used,
)
from tests.runs import CONFIG, Launched, RunResult, relative, weight_error
from tests.transformer_engine import SERVER

LOCAL = "--local-window 20 --window-attn-skip-freq 2"
GROUPED = "--moe-grouped-gemm"
CASES = {
    "llama": Layout("", 1),
    "local window": Layout("", 1, LOCAL),
    "norms of queries and keys": Layout("", 1, layouts.QWEN3),
    "sinks": Layout("", 1, layouts.SINKS),
    "latent": Layout("", 1, layouts.LATENT),
    "tied pp2": Layout(layouts.PP2, 2, layouts.TIED),
    "tp2 sp": Layout(layouts.TP2_SP, 2),
    "cp2 exchange": Layout(layouts.EXCHANGE, 2),
    "cp2 ulysses": Layout(layouts.ULYSSES, 2),
    "pp2 vpp2": Layout(layouts.VPP2, 2),
    "dp2 distributed overlaps": Layout(layouts.OVERLAPS, 2),
    "mixtral": Layout("", 1, layouts.MIXTRAL),
    "mixtral grouped": Layout(GROUPED, 1, layouts.MIXTRAL),
    "gpt-oss": Layout("", 1, layouts.GPT_OSS),
    "gpt-oss grouped": Layout(GROUPED, 1, layouts.GPT_OSS),
    "mixtral tp2 sp": Layout(layouts.TP2_SP, 2, layouts.MIXTRAL),
    "mixtral grouped tp2 sp": Layout(f"{GROUPED} {layouts.TP2_SP}", 2, layouts.MIXTRAL),
    "dots1 grouped ep2": Layout(f"{GROUPED} {layouts.EP2}", 2, layouts.DOTS1),
    "recompute full": Layout(layouts.FULL, 1),
    "recompute modules": Layout(f"{layouts.MODULES} core_attn layernorm mlp", 1),
}


def trained_both(
    launched: Launched, emulated: Launched, layout: Layout, attention: str = "reference"
) -> tuple[RunResult, RunResult]:
    """The run in a layout on the emulated machine, and at the same time that on a CPU in one process."""
    flags = [*COMMON, *LINEAR, *layout.model.split()]
    cuda = ["--device", "cuda", "--attention-backend", attention, *layout.flags.split()]
    with ThreadPoolExecutor() as threads:
        reference = threads.submit(launched, flags, 1)
        run = threads.submit(emulated, [*flags, *cuda], layout.processes)
        return run.result(), reference.result()


@pytest.mark.parametrize("name", CASES)
def test_transformer_engine_trains_the_same_model(launched: Launched, emulated: Launched, name: str) -> None:
    run, reference = trained_both(launched, emulated, CASES[name])
    errors_of(run, reference)  # prints them: `make test-te SOME=-rP` shows the largest of each case
    assert_same_rows(run, reference)
    assert_same_training(run, reference, CASES[name])
    assert_window_is_used(run)


def errors_of(run: RunResult, reference: RunResult) -> dict[str, float]:
    errors = {key: relative(run.series(key), reference.series(key)) for key in ("lm_loss", "grad_norm")}
    errors["weights"], _ = weight_error(run.weights("final"), reference.weights("final"))
    print(", ".join(f"{key} {error:.1e}" for key, error in errors.items()))
    return errors


@pytest.mark.parametrize("grouped", ["", GROUPED])
def test_muon_joins_the_parts_of_experts(launched: Launched, emulated: Launched, grouped: str) -> None:
    """The parts of a matrix joined along the wrong dimension change its weights by 1e-2."""
    try:
        compat.check_muon()
    except UserError as missing:
        pytest.skip(str(missing))
    model = f"{layouts.MIXTRAL} --optimizer muon --muon-fp32-matmul-prec highest"
    errors = errors_of(*trained_both(launched, emulated, Layout(f"{grouped} {layouts.TP2_SP}", 2, model)))
    assert max(errors.values()) <= 1e-4, errors


def train(rank: int, flags: list[str]) -> dict[str, int]:
    """Run the trainer; return how often it called each function of Transformer Engine's compiled part."""
    from pretrain_skyladder import main
    from tests.transformer_engine.extension import calls

    calls.clear()
    assert main(flags) == 0
    return dict(calls)


OVERLAPS = {"llama": "", "olmo3": layouts.OLMO3, "cp2": layouts.EXCHANGE, "recompute full": layouts.FULL}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapped_tensor_communication_is_the_same_computation(
    small_data: SmallData, tmp_path: Path, name: str
) -> None:
    """Each linear layer's product shares a call with its communication, and no weight differs."""
    flags = [*CONFIG, *small_data.flags, *COMMON, *LINEAR, "--bf16", *layouts.TP2_SP.split(), *OVERLAPS[name].split()]
    flags += ["--device", "cuda", "--attention-backend", "reference"]
    calls = {}
    for run, more in {"plain": [], "overlapped": ["--tp-comm-overlap"]}.items():
        folder = tmp_path / run
        dump = ["--save", str(folder), "--dump-trajectory", str(folder / "trajectory")]
        ranks = 4 if name == "cp2" else 2
        calls[run] = call(train, ranks, [*flags, *dump, *more], group=False, server=SERVER)[0]
    plain, overlapped = (RunResult(tmp_path / run, 0, "", "") for run in calls)
    assert "gather" not in calls["plain"]
    assert min(calls["overlapped"][kind] for kind in ("gather", "reduce_scatter")) > 0
    assert errors_of(overlapped, plain)["weights"] == 0


@pytest.mark.parametrize("scheme", [layouts.EXCHANGE, layouts.ULYSSES])
def test_te_thd_attends_to_documents_that_cross_ranks(launched: Launched, emulated: Launched, scheme: str) -> None:
    """Its kernels compute in bf16 alone; the reference is a CPU's bf16."""
    run, reference = trained_both(launched, emulated, Layout(scheme, 2, "--bf16"), "te_thd")
    assert sum(run.series("cp_bytes")) > 0
    errors = errors_of(run, reference)
    assert errors["lm_loss"] <= 2e-3, errors
    assert errors["grad_norm"] <= 2e-2, errors
