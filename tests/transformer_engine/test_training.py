"""Transformer Engine's layers and optimizer train the same model as Megatron-Core's on a CPU, in every layout."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.parity import test_layouts as layouts
from tests.parity.test_layouts import COMMON, LINEAR, Layout, assert_same_rows, assert_same_training
from tests.runs import Launched, RunResult

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


def trained_both(launched: Launched, emulated: Launched, layout: Layout) -> tuple[RunResult, RunResult]:
    """The run in a layout on the emulated machine, and at the same time that on a CPU in one process."""
    flags = [*COMMON, *LINEAR, *layout.model.split()]
    cuda = ["--device", "cuda", "--attention-backend", "reference", *layout.flags.split()]
    with ThreadPoolExecutor() as threads:
        reference = threads.submit(launched, flags, 1)
        run = threads.submit(emulated, [*flags, *cuda], layout.processes)
        return run.result(), reference.result()


@pytest.mark.parametrize("name", CASES)
def test_transformer_engine_trains_the_same_model(launched: Launched, emulated: Launched, name: str) -> None:
    run, reference = trained_both(launched, emulated, CASES[name])
    assert_same_rows(run, reference)
    assert_same_training(run, reference, CASES[name])
