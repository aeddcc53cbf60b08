"""Saved under one layout, loaded under another: the next losses are those of the run that went on."""

from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.tensors import Stored
from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG, read_jsonl, relative

SAVED, STEPS, TOLERANCE = 3, 8, 1e-5
SCRIPT = "pretrain_skyladder.py"
COMMON = f"""--seq-length 64 --lr-warmup-iters 2 --lr-decay-iters {STEPS} --window-start 7 --window-rate 9
    --document-mask --eod-mask-loss""".split()
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"
EP2 = "--expert-model-parallel-size 2"
LAYOUTS = {
    "1": (1, ""),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "tp2 pp2": (4, f"{TP2} {PP2}"),
    "pp2 vpp2": (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "dp2": (2, ""),
    "dp2 distributed": (2, f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"),
    "cp2": (2, "--context-parallel-size 2"),
    "1 distributed": (1, DISTRIBUTED),
    "tp2 sp dp2 distributed": (4, f"{TP2} --sequence-parallel {DISTRIBUTED}"),
    "pp2 vpp2 dp2 distributed": (4, f"{PP2} --num-layers-per-virtual-pipeline-stage 1 {DISTRIBUTED}"),
    "cp2 dp2 distributed": (4, f"--context-parallel-size 2 {DISTRIBUTED}"),
    "ep2": (2, EP2),
    "ep2 distributed": (2, f"{EP2} {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"),
    "cp2 ep2": (2, f"--context-parallel-size 2 {EP2}"),
    "tp2 sp": (2, f"{TP2} --sequence-parallel"),
    "pp2 ep2 distributed": (4, f"{PP2} {EP2} {DISTRIBUTED}"),
    "tp2 sp ep2": (4, f"{TP2} --sequence-parallel {EP2}"),
}
EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "96", "--moe-aux-loss-coeff", "0.1")
BIASED = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48"),
    *("--moe-shared-expert-intermediate-size", "48", "--moe-layer-freq", "0", "1", "1", "1"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-bias-update-rate", "0.02"),
)
# Every layout is saved under once and loaded into once, next to one that shares the state out in another way.
RING = ["pp2 vpp2", "dp2 distributed", "tp2", "cp2 dp2 distributed", "tp2 pp2", "1", "pp2 vpp2 dp2 distributed", "dp2"]
RING += ["tp2 sp dp2 distributed", "pp2", "1 distributed", "cp2"]
RING_OF_EXPERTS = ["cp2 ep2", "1", "tp2 sp ep2", "ep2 distributed", "tp2 sp", "pp2 ep2 distributed", "ep2"]


class Grid:
    """Runs layouts; each source and each pair once."""

    def __init__(self, data: SmallData, folder: Path) -> None:
        self.data, self.folder = data, folder
        self._made: dict[tuple[str, ...], Path] = {}

    def both(self, source: str, target: str, *flags: str) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of `target` from the checkpoint of `source`, and of a run without a stop."""
        return self.resumed(source, target, *flags), self.losses(self._run("1", STEPS, flags))[-2 * (STEPS - SAVED) :]

    def source(self, layout: str, *flags: str) -> Path:
        return self._run(layout, SAVED, flags)

    def resumed(self, source: str, target: str, *flags: str) -> list[float]:
        return self.losses(self._run(target, STEPS, (*flags, "--load", str(self.source(source, *flags)))))

    def biases(self, layout: str, *flags: str) -> torch.Tensor:
        """The expert biases at the end of a run of all steps."""
        stored = Stored(self._run(layout, STEPS, flags) / "checkpoints" / f"iter_{STEPS:07d}")
        names = sorted(name for name in stored.tensors if name.endswith("expert_bias"))
        assert len(names) == 3
        return torch.stack([stored.read(name) for name in names])

    def losses(self, run: Path) -> list[float]:
        return [record[key] for record in read_jsonl(run / "metrics.jsonl") for key in ("lm_loss", "grad_norm")]

    def _run(self, layout: str, steps: int, flags: tuple[str, ...]) -> Path:
        key = (layout, str(steps), *flags)
        if key not in self._made:
            processes, words = LAYOUTS[layout]
            folder = self.folder / f"run{len(self._made)}"
            every = [*CONFIG, *COMMON, *self.data.flags, *words.split(), *flags]
            Commands(processes).run(SCRIPT, *every, "--train-iters", steps, "--save", folder)
            self._made[key] = folder
        return self._made[key]


@pytest.fixture(scope="module")
def grid(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return Grid(small_data, tmp_path_factory.mktemp("grid"))


def around(ring: list[str], quick: int) -> list[object]:
    """Return each layout with the one after it; all but the first `quick` pairs are slow."""
    pairs = list(zip(ring, ring[1:] + ring[:1], strict=True))
    return [*pairs[:quick], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs[quick:])]


@pytest.mark.parametrize(("source", "target"), around(RING, quick=2))
def test_the_next_losses_are_those_of_the_run_that_went_on(grid: Grid, source: str, target: str) -> None:
    assert relative(*grid.both(source, target)) <= TOLERANCE


ALONE_IN_BF16 = pytest.param("1", "1", marks=pytest.mark.slow)


@pytest.mark.parametrize(("source", "target"), [*around(RING_OF_EXPERTS, quick=1), ALONE_IN_BF16])
def test_experts_and_their_biases_go_on(grid: Grid, source: str, target: str) -> None:
    """Biases bit for bit, in float32: they are sums of steps of one size."""
    flags = (*BIASED, *(["--bf16"] if source == target else []))
    assert relative(*grid.both(source, target, *flags)) <= TOLERANCE
    biases = grid.biases("1", *flags)
    loaded = grid.biases(target, *flags, "--load", str(grid.source(source, *flags)))
    assert biases.dtype == torch.float32
    assert torch.equal(loaded, biases)
    assert len(biases.unique()) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "plain", "flags"),
    [
        ("1", "1 distributed", "1", ()),
        ("1 distributed", "1", "1", ()),
        ("ep2", "ep2 distributed", "ep2", EXPERTS),  # experts have an optimizer of their own
        ("ep2 distributed", "ep2", "ep2", EXPERTS),
    ],
)
def test_master_weights_pass_between_the_optimizers(
    grid: Grid, source: str, target: str, plain: str, flags: tuple[str, ...]
) -> None:
    """Without clipping, whose norm they add up in another order, both make the same updates, bit for bit."""
    flags = (*flags, "--bf16", "--clip-grad", "0")
    resumed, whole = grid.resumed(source, target, *flags), grid.resumed(plain, plain, *flags)
    assert resumed[::2] == whole[::2]
    assert len(resumed) == 2 * (STEPS - SAVED)
