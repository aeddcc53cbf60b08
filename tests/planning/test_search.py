"""The search for layouts: what it lists is legal and fits, and nothing that it passed over would have been better."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from megatron_ext.config import Config, OptimizerConfig
from megatron_ext.config.arguments import parse, parse_stages
from megatron_ext.config.checks import mistakes
from megatron_ext.planning.memory import HEADROOM, estimate
from megatron_ext.planning.search import candidates, search, windows, with_less_kept
from megatron_ext.planning.step_time import Machine, read_speeds, step_time
from pretrain_skyladder import main as pretrain
from tests.launcher import ROOT
from tools.plan_run import main, write

SPEEDS = read_speeds()
USABLE = 1 - HEADROOM
SIZE = {axis: f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")}
SIZE["context"] = "context_parallel_size"


def recipe(name: str) -> Config:
    return parse_stages(["--config", str(ROOT / "examples" / "configs" / name)])[0].config


MIXTURE = "--model-preset Qwen3-30B-A3B --bf16 --seq-length 32768 --global-batch-size 256 --data-path data/any"


@pytest.mark.parametrize(
    ("name", "gpus", "vocabulary", "optimizer"),
    [
        ("skyladder/skyladder_1b_32k.yaml", 16, 32000, "muon"),
        ("prolong/prolong_8b.yaml", 64, 128256, "adam"),
        (None, 64, 151936, "adam"),
    ],
    ids=["skyladder", "prolong", "mixture"],
)
def test_what_is_listed_is_legal_and_fits(name: str | None, gpus: int, vocabulary: int, optimizer: str) -> None:
    config = parse(MIXTURE.split()) if name is None else recipe(name)
    config = replace(config, optimizer=OptimizerConfig(optimizer=optimizer))  # type: ignore[arg-type]
    result = search(config, Machine(gpus, "H100", vocabulary, SPEEDS), top=5)
    assert all(layout.seconds < result.best[0].seconds for layout in result.too_large)
    assert result.too_large or name != "prolong/prolong_8b.yaml"
    assert len(result.best) == 5
    for layout in result.best:
        assert list(mistakes(layout.config, gpus)) == []
        assert layout.memory == estimate(layout.config, gpus, vocabulary).total <= USABLE * 80 * 2**30
        assert (f"EP {layout.config.parallel.expert_model_parallel_size}" in layout.name) == (name is None)
    assert [layout.seconds for layout in result.best] == sorted(layout.seconds for layout in result.best)


@pytest.mark.parametrize("experts", [None, 8])
def test_no_legal_layout_that_fits_is_faster_than_the_best(experts: int | None) -> None:
    config = recipe("skyladder/skyladder_1b_32k.yaml")
    gpus = 8
    vocabulary = 32000
    width = None if experts is None else 1024
    config = replace(config, model=replace(config.model, num_experts=experts, moe_ffn_hidden_size=width))
    machine = Machine(gpus, "H100", vocabulary, SPEEDS)
    result = search(config, machine, top=1)
    for axis, name in SIZE.items():
        sizes = {getattr(candidate.parallel, name) for candidate in candidates(config, machine, Counter())}
        assert sizes >= ({1} if axis == "expert" and experts is None else {1, 2})
    legal = [
        candidate
        for kept in candidates(config, machine, Counter())
        for candidate in (kept, *with_less_kept(kept))
        if estimate(candidate, gpus, vocabulary).total <= USABLE * 80 * 2**30 and not list(mistakes(candidate, gpus))
    ]
    assert len(legal) > 20
    seconds = [
        mean(step_time(candidate, window, machine).total for window in windows(candidate)) for candidate in legal
    ]
    assert result.best[0].seconds == pytest.approx(min(seconds))


def test_inputs_go_to_the_host_only_where_the_layout_does_not_fit_without() -> None:
    short = recipe("skyladder/skyladder_1b_32k.yaml")
    config = replace(short, data=replace(short.data, seq_length=2**18), window=replace(short.window, window_end=None))
    names = []
    for memory in (60.0, 80.0, 141.0):
        speeds = replace(SPEEDS, gpus=SPEEDS.gpus | {"H100": replace(SPEEDS.gpu("H100"), memory=memory)})
        for layout in search(config, Machine(1, "H100", 32000, speeds), top=5).best:
            names.append(f"{memory}: {layout.name}")
            if layout.config.parallel.offload_layer_inputs:
                parallel = replace(layout.config.parallel, offload_layer_inputs=False)
                without = estimate(replace(layout.config, parallel=parallel), 1, 32000)
                assert without.total > USABLE * memory * 2**30 >= layout.memory
    assert any("inputs on the host" in name for name in names), names
    assert not all("inputs on the host" in name for name in names), names


def test_blocks_of_the_mlp_are_tried_where_norms_are_not_recomputed() -> None:
    config = replace(recipe("skyladder/skyladder_1b_32k.yaml"), model=parse(["--model-preset", "Olmo-3-7B"]).model)
    plain = next(candidates(config, Machine(1, "H100", 100278, SPEEDS), Counter()))
    lighter = [candidate.parallel for candidate in with_less_kept(plain) if not list(mistakes(candidate, 1))]
    assert any(parallel.mlp_block_tokens and parallel.recompute_granularity is None for parallel in lighter)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context", "data", "expert"])
def test_memory_falls_with_each_sharding_axis(axis: str) -> None:
    config = parse(MIXTURE.split()) if axis == "expert" else recipe("skyladder/skyladder_1b_32k.yaml")
    plain = replace(config.parallel, recompute_granularity=None, use_distributed_optimizer=True)
    needs = []
    for size in (1, 2, 4):
        parallel = plain if axis == "data" else replace(plain, **{SIZE[axis]: size})
        parallel = replace(parallel, sequence_parallel=parallel.tensor_model_parallel_size > 1)
        gpus = 64 if axis == "expert" else 2 * size
        needs.append(estimate(replace(config, parallel=parallel), gpus, 32000))
    assert all(larger.total > smaller.total for larger, smaller in pairwise(needs))
    # a later stage's loss head is the same; its layers are fewer, but more micro-batches are in flight
    shrinking = {"pipeline": "weights", "data": "optimizer", "expert": "weights"}.get(axis, "activations")
    assert all(getattr(larger, shrinking) > getattr(smaller, shrinking) for larger, smaller in pairwise(needs))


SKYLADDER = ["--config", str(ROOT / "examples/configs/skyladder/skyladder_1b_8k.yaml"), "--documents", "whole"]


def lines_of(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> list[str]:
    assert main([*words, "--top", "1"]) == status
    return capsys.readouterr().out.splitlines()


def test_memory_is_the_reason_where_nothing_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--config", str(ROOT / "examples/configs/prolong/prolong_8b.yaml"), "--documents", "whole"]
    text = "\n".join(lines_of([*large, "--gpus", "2", "--gpu", "A100-40GB"], capsys, status=1))
    assert "layouts: memory; the smallest needs 7" in text
    assert "available are 34.0 GiB (40 GiB less 15% of headroom)" in text


def test_the_last_window_is_that_of_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A shrinking schedule that is cut off before it widens again: its last window is not its widest."""
    shrinking = ["--window-schedule", "long_to_short", "--train-iters", "60000", "--gpus", "8"]
    text = "\n".join(lines_of([*SKYLADDER, *shrinking], capsys))
    assert "at the last window (693 tokens)" in text
    config = parse([*SKYLADDER[:2], *shrinking[:4]])
    machine = Machine(8, "H100", 32000, SPEEDS)
    best = search(config, machine, top=1).best[0]
    assert best.last == step_time(best.config, 693, machine)
    assert best.last.total < best.seconds < step_time(best.config, 8192, machine).total


def test_a_run_without_data_is_planned_on_typical_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.yaml"
    words = ["--model-preset", "1B", "--bf16", "--seq-length", "8192", "--global-batch-size", "8", "--gpus", "8"]
    text = "\n".join(lines_of([*words, "--output", str(output)], capsys))
    assert text.startswith("rows: documents of lognormal lengths")
    assert parse(["--config", str(output)]).data.data_path == ()
    written = text.partition(" --dry-run")[0].split("pretrain_skyladder.py")[1].split()
    assert list(mistakes(parse(written), 8)) == []


def test_a_plan_waits_for_its_longest_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank may wait for another as long as a step takes, Slurm for the four steps before a checkpoint."""
    output = tmp_path / "plan.yaml"
    for batch in (2, 2000):
        words = ["--model-preset", "1B", "--bf16", "--seq-length", "131072", "--global-batch-size", str(batch)]
        text = "\n".join(lines_of([*words, "--gpus", "2", "--output", str(output), "--overwrite"], capsys))
        minutes = parse(["--config", str(output)]).parallel.distributed_timeout_minutes
        longest = re.search(r"a step takes up to (\d+) s; .*--signal=USR1@(\d+)", text)
        assert (longest is None) == (batch == 2)
        if longest is None:
            assert minutes == 10
        else:
            seconds, signal = map(int, longest.groups())
            assert minutes * 60 >= 2 * seconds
            assert signal > 4 * seconds
    write(Config(), 20_000, output, 2)  # sbatch takes at most 65,535
    assert "--signal" not in capsys.readouterr().out


def test_any_number_of_context_parallel_ranks_that_divides_a_row_is_tried() -> None:
    config = recipe("skyladder/skyladder_1b_32k.yaml")
    config = replace(config, data=replace(config.data, seq_length=3 * 2**14, global_batch_size=12))
    tried = candidates(config, Machine(12, "H100", 32000, SPEEDS), Counter())
    assert {candidate.parallel.context_parallel_size for candidate in tried} == {1, 2, 3, 4, 6, 12}


def test_the_files_own_layout_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown with the reason if it is not possible, also where no other layout is."""
    odd = ["--global-batch-size", "9", "--micro-batch-size", "3"]
    config = parse([*SKYLADDER[:2], *odd])
    names = [layout.name for layout in search(config, Machine(1, "H100", 32000, SPEEDS), top=20).best]
    assert any("micro-batch 3" in name for name in names), names
    large = ["--config", str(ROOT / "examples/configs/prolong/prolong_8b.yaml"), "--documents", "whole"]
    for gpus, gpu, status in (("64", "H100", 0), ("2", "A100-40GB", 1)):
        flags = ["--gpus", gpus, "--gpu", gpu, "--tensor-model-parallel-size", "1", "--no-sequence-parallel"]
        text = "\n".join(lines_of([*large, *flags], capsys, status))
        assert "own TP 1, PP 1, CP 1" in text
        assert ": memory; it needs" in text
    text = "\n".join(lines_of([*large, "--gpus", "2", "--tensor-model-parallel-size", "4"], capsys, status=1))
    assert "own world size: got 2 processes, needs" in text


@pytest.mark.parametrize("mixture", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_written_passes_a_dry_run(mixture: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.yaml"
    words = ["--config", str(ROOT / "examples/configs/skyladder/skyladder_1b_32k.yaml"), "--gpus", "16"]
    words += ["--num-experts", "8", "--moe-ffn-hidden-size", "2048"] if mixture else []
    shown = "\n".join(lines_of([*words, "--gpu", "h100", "--output", str(output)], capsys))
    assert "the window schedule saves" in shown
    assert (", EP " in shown) == mixture
    assert ("--no-moe-grouped-gemm" in shown) == parse(["--config", str(output)]).parallel.moe_grouped_gemm
    assert pretrain(["--config", str(output), "--dry-run", "--world-size", "16"]) == 0
    assert parse(["--config", str(output)]).parallel.use_distributed_optimizer
