"""From --dump-trajectory alone an outsider's Llama repeats the run: losses, gradient norms and weights."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint.pretrained import Pretrained
from tests.conftest import SmallData, slow_but
from tests.parity import test_layouts as layouts
from tests.parity.oracle import Repeated, repeat
from tests.parity.test_layouts import CP2, DEEPSEEK, GEMMA3, GPT_OSS, LATENT, MIXTRAL, OLMO3, PP2, QWEN3, TP2, VPP2
from tests.runs import RunResult, launch, relative, weight_error

STEPS = 8
TOLERANCE = 1e-5
# large weights make few tokens decide: Adam turns the rounding of their gradients into as much as 1.4e-5, by the CPU
WEIGHTS_APART = 2e-5
FIRST_WINDOW = 7


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two would mostly wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rate(length: int) -> float:
    """Tokens of window per step, such that the last of the steps sees the whole row."""
    return math.ceil((length - FIRST_WINDOW) / (STEPS - 1))


def train(data: SmallData, folder: Path, length: int, *flags: str) -> RunResult:
    """8 steps of the smoke configuration, one process, windows from 7 to `length`."""
    window = ["--window-start", FIRST_WINDOW, "--window-rate", rate(length)]
    run = launch([*data.flags, "--seq-length", length, "--train-iters", STEPS, *window, *flags], 1, folder)
    assert len(run.metrics) == STEPS
    return run


def assert_repeated(run: RunResult, oracle: Repeated, weights_apart: float = TOLERANCE) -> None:
    loss = relative(run.series("lm_loss"), oracle.lm_loss)
    loss = max(loss, relative(run.series("train_loss"), oracle.train_loss))
    norm = relative(run.series("grad_norm"), oracle.grad_norm)
    weights, name = weight_error(run.weights("final"), oracle.weights)
    print(f"loss {loss:.1e}, grad_norm {norm:.1e}, weights {weights:.1e} ({name})")
    if "moe_aux_loss" in run.metrics[0]:
        assert relative(run.series("moe_aux_loss"), oracle.balance) <= TOLERANCE
    assert loss <= TOLERANCE
    assert norm <= TOLERANCE
    assert weights <= weights_apart, name


def assert_dump_is_true(run: RunResult, data: SmallData, length: int, flags: str) -> None:
    """Windows follow the formula; document ends and the loss mask follow from the tokens."""
    ends_seen = 0
    for step in range(STEPS):
        batch = np.load(run.trajectory / f"step_{step:06d}.npz")
        assert batch["window"] == run.metrics[step]["window"]
        assert batch["window"] == min(length, FIRST_WINDOW + math.floor(rate(length) * step))
        inputs = batch["tokens"][:, :-1]
        ends_by_row = np.split(batch["document_ends"], batch["document_ends_offsets"][1:-1])
        for row, ends in zip(inputs, ends_by_row, strict=True):
            np.testing.assert_array_equal(ends, np.flatnonzero(row == data.eod) + 1)
            ends_seen += len(ends)
        np.testing.assert_array_equal(batch["loss_mask"], ~((inputs == data.eod) & ("--eod-mask-loss" in flags)))
        divisor = batch["weights" if "--loss-denominator weights" in flags else "loss_mask"].sum()
        assert run.metrics[step]["denominator"] == pytest.approx(divisor, rel=1e-6)
        if "--token-weighting" in flags:
            assert run.metrics[step]["weight_max"] == batch["weights"].max()
            assert not batch["weights"][~batch["loss_mask"]].any()
    assert batch["window"] == length
    assert ends_seen > 50


YARN = layouts.YARN
LOCAL = "--local-window 20 --window-attn-skip-freq 2"
UNFROZEN = "--token-weighting unfrozen --short-context 32"
INSIDE = f"--document-mask --eod-mask-loss {UNFROZEN}"
DECAY = "--weight-decay-all --weight-decay 0.5"
FAST = ("token weights, z-loss", "DeepSeek-V3", "gpt-oss")
CASES = {  # the length of rows, and flags
    "own values": (256, "--no-document-mask"),
    "token weights, z-loss": (128, f"--no-document-mask {UNFROZEN} --z-loss 1e-3"),
    "Qwen3-MoE": (128, f"--document-mask {MIXTRAL} --qk-layernorm --moe-router-topk 3"),
    "document mask, eod masked": (256, "--document-mask --eod-mask-loss"),
    "sliding, w tokens with itself": (256, "--document-mask --window-mask sliding_w --lr-warmup-from-zero"),
    "sliding window, every second layer local": (256, f"--document-mask --window-mask sliding {LOCAL}"),
    "local layers beside the window's grid": (256, "--no-document-mask --local-window 30 --window-attn-skip-freq 3"),
    "local layers that the schedule does not bound": (256, f"--document-mask {LOCAL} --local-window-fixed"),
    "token weights inside documents": (256, f"{INSIDE} --short-stride 32 --weight-strength 0.5"),
    "dumped token weights": (128, f"{INSIDE} --weight-score npmi --weight-strength 0.2 --loss-denominator weights"),
    "every weight decays, TinyLlama's initialisation": (256, f"--no-document-mask {DECAY} --init-scheme tinyllama"),
    "tied": (256, f"--no-document-mask {layouts.TIED} --micro-batch-size 4"),
    "qkv bias": (256, "--document-mask --add-qkv-bias"),
    "Qwen3": (128, f"--document-mask {QWEN3}"),
    "Phi": (128, f"--document-mask {layouts.PHI}"),
    "gpt-oss's attention sinks": (128, f"--document-mask --softmax-type learnable {LOCAL}"),
    "Mixtral, token weights": (128, f"--no-document-mask {MIXTRAL} {UNFROZEN}"),
    "Gemma 3": (128, f"--no-document-mask {GEMMA3} --query-pre-attn-scalar 50"),
    "gpt-oss": (128, f"--document-mask {GPT_OSS} --moe-router-topk 3 --kv-channels 24 {YARN} --no-rope-truncate"),
    "latent attention": (128, f"--document-mask {LATENT} --q-lora-rank none"),
    "DeepSeek-V3": (128, f"--document-mask {DEEPSEEK}"),
    "Olmo 3": (128, f"--document-mask {OLMO3}"),
}


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_an_outsider_repeats_the_run(small_data: SmallData, tmp_path: Path, name: str) -> None:
    length, flags = CASES[name]
    run = train(small_data, tmp_path / "run", length, *flags.split())
    assert_dump_is_true(run, small_data, length, flags)
    rates = run.series("learning_rate")
    weighted, dumped = "--token-weighting" in flags, "npmi" in flags  # the outsider cannot compute those
    assert_repeated(run, repeat(run.trajectory, rates), weights_apart=WEIGHTS_APART if dumped else TOLERANCE)

    if weighted and not dumped:  # the weights matter, and are not those of another lambda
        assert relative(run.series("train_loss"), run.series("lm_loss")) > 10 * TOLERANCE
        repeated = repeat(run.trajectory, rates, own_weights=True)
        assert_repeated(run, repeated)
        for step in range(STEPS):
            batch = np.load(run.trajectory / f"step_{step:06d}.npz")
            np.testing.assert_allclose(batch["weights"], repeated.token_weights[step], rtol=0, atol=1e-3)
            np.testing.assert_allclose(batch["short_loss"], repeated.short_losses[step], rtol=0, atol=1e-4)
        assert np.isnan(batch["short_loss"][:, :32]).all()
        assert np.isfinite(batch["short_loss"]).any()

    # negative control: with another mask, everything else the same, nothing agrees from the first step on
    whole_row = repeat(run.trajectory, rates[:1], window=length)
    assert relative(run.series("lm_loss")[:1], whole_row.lm_loss) > 10 * TOLERANCE
    assert relative(run.series("grad_norm")[:1], whole_row.grad_norm) > 10 * TOLERANCE


def test_weights_of_the_data_set_are_dumped_too(small_data: SmallData, tmp_path: Path) -> None:
    prefix = tmp_path / "weighted"
    for suffix in (".bin", ".idx"):
        shutil.copy(small_data.prefix.with_suffix(suffix), prefix.with_suffix(suffix))
    tokens = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    np.save(f"{prefix}.weights.npy", (1 + tokens % 3).astype(np.float32))
    flags = ["--data-path", prefix, "--tokenizer-model", small_data.tokenizer, "--token-weighting", "dataset"]
    flags += ["--eod-mask-loss", "--no-document-mask", "--seq-length", 128, "--train-iters", 3]
    run = launch([*flags, "--lr-warmup-iters", 1, "--window-schedule", "constant"], 1, tmp_path / "run")
    batch = np.load(run.trajectory / "step_000000.npz")
    np.testing.assert_array_equal(batch["weights"], (1 + batch["tokens"][:, 1:] % 3) * batch["loss_mask"])
    assert "short_loss" not in batch
    assert_repeated(run, repeat(run.trajectory, run.series("learning_rate")), WEIGHTS_APART)


BASES = ["--rotary-base", "50000", "--rope-window-bases", "60:100", "200:3000"]
WINDOWS = ["--seq-length", 256, "--train-iters", STEPS, "--window-start", "16", "--window-rate", "40"]
PARALLEL = [(2, f"{UNFROZEN} {PP2} --recompute-granularity full"), (2, CP2), (4, f"{TP2} {VPP2}")]


@pytest.mark.parametrize(("processes", "flags"), slow_but(PARALLEL[:1], PARALLEL))
def test_bases_that_follow_the_window(small_data: SmallData, tmp_path: Path, processes: int, flags: str) -> None:
    """Every second layer is without angles; a checkpoint on the way has the base of its last window."""
    more = ["--no-document-mask", "--no-rope-freq", "2", "--save-interval", "4", *flags.split()]
    run = launch([*small_data.flags, *WINDOWS, *BASES, *more], processes, tmp_path)
    windows, rates = run.series("window"), run.series("learning_rate")
    assert windows[0] <= 60 < windows[3] <= 200 < windows[-1]  # all three bases are used
    assert_repeated(run, repeat(run.trajectory, rates))
    fixed = repeat(run.trajectory, rates[:1], bases=False)
    assert relative(run.series("grad_norm")[:1], fixed.grad_norm) > 100 * TOLERANCE
    checkpoints = [run.folder / "checkpoints" / f"iter_{step:07}" for step in (4, STEPS)]
    assert [Pretrained.find(checkpoint).model.rotary_base for checkpoint in checkpoints] == [3000.0, 50000.0]


@pytest.mark.slow
def test_evaluation_takes_the_base_that_was_trained_with(small_data: SmallData, tmp_path: Path) -> None:
    """Stopped at a window whose base is 100, the model is evaluated as one whose base has always been 100."""
    flags = [*small_data.flags, *WINDOWS, "--window-rate", "4", "--eval-interval", "4", "--eval-iters", "1"]
    table, plain, larger_base = (
        launch([*flags, "--rotary-base", base, *more], 1, tmp_path / str(number))
        for number, (base, *more) in enumerate([("5000", "--rope-window-bases", "60:100"), ("100",), ("5000",)])
    )
    assert max(table.series("window")) <= 60
    losses = [[record["valid_loss"] for record in run.evaluations] for run in (table, plain, larger_base)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
