"""Saved under one layout, loaded under another: the next losses are those of the run that went on."""

import pytest
import torch

from megatron_ext.checkpoint.tensors import Stored
from tests.conftest import slow_but
from tests.parity.test_layouts import (
    CP2,
    DISTRIBUTED,
    DOTS1,
    EP2,
    MIXTRAL,
    OVERLAPS,
    PP2,
    TP2,
    TP2_SP,
    UNEVEN,
    UNEVEN_VPP2,
    VPP2,
)
from tests.runs import Launched, RunResult, relative

SAVED = 3
STEPS = 8
TOLERANCE = 1e-5
COMMON = f"""--seq-length 64 --lr-warmup-iters 2 --lr-decay-iters {STEPS} --window-start 7 --window-rate 9
    --document-mask --eod-mask-loss""".split()
LAYOUTS = {
    "1": (1, ""),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "tp2 pp2": (4, f"{TP2} {PP2}"),
    "pp2 vpp2": (2, VPP2),
    "uneven": (2, UNEVEN),
    "uneven vpp2 dp2 distributed": (4, f"{UNEVEN_VPP2} {DISTRIBUTED}"),
    "dp2": (2, ""),
    "dp2 distributed": (2, OVERLAPS),
    "cp2": (2, CP2),
    "1 distributed": (1, DISTRIBUTED),
    "tp2 sp dp2 distributed": (4, f"{TP2_SP} {DISTRIBUTED}"),
    "pp2 vpp2 dp2 distributed": (4, f"{VPP2} {DISTRIBUTED}"),
    "cp2 dp2 distributed": (4, f"{CP2} {DISTRIBUTED}"),
    "ep2": (2, EP2),
    "ep2 distributed": (2, f"{EP2} {OVERLAPS}"),
    "cp2 ep2": (2, f"{CP2} {EP2}"),
    "tp2 sp": (2, TP2_SP),
    "pp2 ep2 distributed": (4, f"{PP2} {EP2} {DISTRIBUTED}"),
    "tp2 sp ep2": (4, f"{TP2_SP} {EP2}"),
}
# Every layout is saved under once and loaded into once, next to one that shares the state out in another way.
RING = ["pp2 vpp2", "dp2 distributed", "tp2", "cp2 dp2 distributed", "tp2 pp2", "1", "pp2 vpp2 dp2 distributed", "dp2"]
RING += ["tp2 sp dp2 distributed", "uneven", "pp2", "uneven vpp2 dp2 distributed", "1 distributed", "cp2"]
RING_OF_EXPERTS = ["cp2 ep2", "1", "tp2 sp ep2", "uneven vpp2 dp2 distributed", "ep2 distributed", "tp2 sp"]
RING_OF_EXPERTS += ["pp2 ep2 distributed", "ep2"]


def trained(launched: Launched, layout: str, steps: int, *flags: object) -> RunResult:
    processes, words = LAYOUTS[layout]
    return launched([*COMMON, *words.split(), *flags, "--train-iters", steps], processes)


def resumed(launched: Launched, source: str, target: str, *flags: str) -> RunResult:
    return trained(launched, target, STEPS, *flags, "--load", trained(launched, source, SAVED, *flags).folder)


def apart(run: RunResult, whole: RunResult) -> float:
    return max(relative(run.series(key), whole.series(key)[SAVED:]) for key in ("lm_loss", "grad_norm"))


def biases(run: RunResult) -> torch.Tensor:
    """The expert biases at the end."""
    stored = Stored(run.folder / "checkpoints" / f"iter_{STEPS:07d}")
    names = sorted(name for name in stored.tensors if name.endswith("expert_bias"))
    assert len(names) == 3
    return torch.stack([stored.read(name) for name in names])


def around(ring: list[str], quick: int) -> list[object]:
    """Return each layout with the one after it; all but the first `quick` pairs are slow."""
    pairs = list(zip(ring, ring[1:] + ring[:1], strict=True))
    return slow_but(pairs[:quick], pairs)


@pytest.mark.parametrize(("source", "target"), around(RING, quick=1))
def test_the_next_losses_are_those_of_the_run_that_went_on(launched: Launched, source: str, target: str) -> None:
    assert apart(resumed(launched, source, target), trained(launched, "1", STEPS)) <= TOLERANCE


@pytest.mark.parametrize(("source", "target"), [*around(RING_OF_EXPERTS, quick=1), *slow_but([], [("1", "1")])])
def test_experts_and_their_biases_go_on(launched: Launched, source: str, target: str) -> None:
    """Biases bit for bit, in float32: they are sums of steps of one size. Alone in bf16."""
    flags = (*DOTS1.split(), *(["--bf16"] if source == target else []))
    whole = trained(launched, "1", STEPS, *flags)
    run = resumed(launched, source, target, *flags)
    assert apart(run, whole) <= TOLERANCE
    assert biases(run).dtype == torch.float32
    assert torch.equal(biases(run), biases(whole))
    assert len(biases(whole).unique()) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "plain", "model"),
    [
        ("1", "1 distributed", "1", ""),
        ("1 distributed", "1", "1", ""),
        ("ep2", "ep2 distributed", "ep2", MIXTRAL),  # experts have an optimizer of their own
        ("ep2 distributed", "ep2", "ep2", MIXTRAL),
    ],
)
def test_master_weights_pass(launched: Launched, source: str, target: str, plain: str, model: str) -> None:
    """Between optimizers, which make the same updates bit for bit without clipping, whose norm has another order."""
    flags = (*model.split(), "--bf16", "--clip-grad", "0")
    run, whole = resumed(launched, source, target, *flags), resumed(launched, plain, plain, *flags)
    assert run.series("lm_loss") == whole.series("lm_loss")
    assert len(run.metrics) == STEPS - SAVED
