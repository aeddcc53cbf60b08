"""A rehearsal's truth: the counts of a real step, planted waits and faults, and the memory estimate of every recipe."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.data.text.tokenizer import vocabulary_size
from megatron_ext.planning.memory import attention_shapes, stage_memory
from megatron_ext.planning.step_time import Machine, read_speeds
from megatron_ext.rehearsal.process import Request
from tests.conftest import slow_but
from tests.launcher import Commands, free_port
from tests.planning.ranks import fullest_rank, fullest_stage, rank_work
from tests.planning.recipe_files import Recipe, known
from tests.rehearsal.mocked import TINY, mocked
from tests.rehearsal.server import in_child
from tools.rehearse import main as rehearse

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# options of the model that set a number, and no shape
_NUMBERS = ("model_preset", "norm_epsilon", "rope_", "rotary_base", "init_", "query_pre_attn_scalar")


@dataclass(frozen=True)
class Case:
    """A stage of a recipe, with its flags."""

    name: str
    argv: tuple[str, ...]
    world_size: int
    vocab_size: int
    config: Config


def shape_of(case: Case) -> str:
    """Return what the memory depends on: not schedules, learning rates, scores nor the borders of documents."""
    config = case.config
    sizes = case.world_size, case.vocab_size, config.data.seq_length * config.data.micro_batch_size
    model = {name: value for name, value in vars(config.model).items() if not name.startswith(_NUMBERS)}
    kernels = [
        [(shapes.scheme, len(shapes.calls)) for shapes in of_kinds]
        for of_kinds in attention_shapes(config, config.window_schedule().end)
    ]
    weighting = config.weighting.token_weighting, config.weighting.short_context, config.weighting.short_stride
    return repr((sizes, model, config.parallel, kernels, config.mask_options().window_mask, weighting))


def cases_of(recipe: Recipe) -> Iterator[Case]:
    for stage in recipe.stages():
        config = stage.config
        name = recipe.name if stage.name is None else f"{recipe.name}: {stage.name}"
        argv = ("--config", str(recipe.path), *(() if stage.name is None else ("--stage", stage.name)))
        vocab_size = vocabulary_size(config.model.vocab_size, config.data.tokenizer_model)
        yield Case(name, argv, recipe.facts["world_size"], vocab_size, config)


def case_of(name: str) -> Case:
    (case,) = (case for case in cases_of(known()[name.split(": ")[0]]) if case.name == name)
    return case


QUICK = "skyladder_120m_8k"
LARGEST_DIFFERENCE = 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    slow_but(
        ["--bf16"],
        [
            "--bf16",
            "--recompute-granularity full",
            "--bf16 --recompute-granularity selective --recompute-modules layernorm",
            "--bf16 --no-untie-embeddings-and-output-weights --add-qkv-bias",
            "--bf16 --qk-layernorm --kv-channels 24",
        ],
    ),
)
def test_a_rehearsal_counts_what_a_real_step_does(tmp_path: Path, flags: str) -> None:
    """Bytes of every part at the peak and FLOPs of every operator, to the last one, on fake CUDA and on a real CPU."""
    words = [*TINY.removesuffix(" --bf16").split(), *flags.split(), "--attention-backend", "reference"]
    (fake,), (real,) = (steps(tmp_path, device, words, 1) for device in ("cuda", "cpu"))
    assert fake["memory"] == real["memory"]
    assert fake["flops"] == real["flops"]
    assert fake["cycles"] == real["cycles"] == 0


MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
HOST_COUNTS = 1024  # bytes of both layers' numbers of tokens, and of the order that they are put in
ALONE = "--use-distributed-optimizer --no-overlap-grad-reduce --no-overlap-param-gather"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("--recompute-granularity full", 1),
        ("--pipeline-model-parallel-size 2", 2),
        ("--expert-model-parallel-size 2 --context-parallel-size 2", 2),
        ("--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
    ],
)
def test_a_rehearsal_of_experts_counts_what_a_real_step_does(tmp_path: Path, flags: str, processes: int) -> None:
    """Of every rank, where the real routers' choices are forced to be what the rehearsal states.

    Of memory all but the numbers of tokens, which are on the host where that is not the device.
    """
    words = [*TINY.split(), *MIXTURE.split(), *flags.split(), "--attention-backend", "reference"]
    words += ALONE.split() if processes > 1 else []
    fakes = steps(tmp_path, "cuda", words, processes)
    for _ in range(3):  # on a busy machine gloo's thread may keep tensors that it has sent, which can raise the peak
        reals = steps(tmp_path, "cpu", words, processes)
        fewest, most = ([sum(step["memory"].values()) for step in rank_steps] for rank_steps in (fakes, reals))
        more = [real_bytes - fake_bytes for real_bytes, fake_bytes in zip(most, fewest, strict=True)]
        if max(more) <= HOST_COUNTS:
            break
    assert 0 <= min(more) <= max(more) <= HOST_COUNTS
    for fake, real in zip(fakes, reals, strict=True):
        for part in ("weights", "gradients", "optimizer", "logits"):  # gloo has lines of its own for the others
            assert 0 <= real["memory"][part] - fake["memory"][part] <= HOST_COUNTS, part
        assert fake["flops"] == real["flops"]
        sent = [{name: calls["sent_bytes"] for name, calls in step["collectives"].items()} for step in (fake, real)]
        assert sent[0] == sent[1]
        assert ("EP" in sent[0]) == ("expert-model" in flags)


def steps(folder: Path, device: str, words: list[str], processes: int) -> list[dict[str, Any]]:
    """The step of each rank: rehearsed one by one, computed all at once."""
    port = str(free_port())
    running = []
    rank_steps = []
    for rank in range(processes):
        argv = [*words, "--device", device]
        request = json.dumps(asdict(Request(argv, processes, rank, [64], "drawn", fake=device == "cuda")))
        command = [sys.executable, str(HERE / "same_kernels.py"), request, str(folder / f"{device}{rank}found")]
        running.append(
            subprocess.Popen(command, cwd=ROOT, env=os.environ | {"MASTER_PORT": port}, stderr=subprocess.PIPE)
        )
        if device == "cuda":
            running[-1].wait()
    for rank, process in enumerate(running):
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()[-3000:]
        answer = json.loads((folder / f"{device}{rank}found").read_text())
        assert answer["fault"] is None, answer["fault"]["traceback"]
        (step,) = answer["steps"]
        assert step["fault"] is None, step["fault"]["traceback"]
        rank_steps.append(step)
    return rank_steps


@pytest.mark.slow
def test_planted_waits_are_found_with_their_lines() -> None:
    result = mocked("waits")
    file = "megatron_ext/planted.py"
    assert result["waits"] == [
        [f"a copy to the host, {file}:11", 1],
        [f"a copy to the host, {file}:7", 1],
        [f"a number, {file}:3", 1],
        [f"a number, {file}:5", 1],
        [f"the shape of nonzero, {file}:9", 1],
    ]
    assert result["values"] == [5, [4, 6]]  # of what was copied to the device, and of what became of it
    # of 8 fp32 numbers: all-reduced among 4; half of them, gathered, scattered, and 4 of 6 rows among 2
    assert result["collectives"] == {"TP x DP": [1, 48], "TP": [4, 16 + 32 + 16 + 16]}
    assert result["composed"] == []  # or operators would be composed that keep more memory


def test_a_planted_fault_is_told_with_its_line() -> None:
    fault = mocked("fault")
    assert "device" in fault["error"]
    assert fault["line"].startswith("megatron_ext/engine/compat.py:")


def within(case: Case) -> None:
    """Memory and FLOPs of the fullest rank, under the widest window and with one document in each row."""
    config = case.config
    sizes = (case.world_size, case.vocab_size)
    window = config.window_schedule().end
    stage = fullest_stage(config, *sizes)
    (step,) = in_child(Request([*case.argv], case.world_size, fullest_rank(config, *sizes), [window], "whole"))["steps"]
    assert step["fault"] is None, step["fault"]["traceback"]
    rehearsed = sum(step["memory"].values())
    assert stage_memory(config, *sizes, stage).total == pytest.approx(rehearsed, rel=LARGEST_DIFFERENCE), step["memory"]
    assert step["cycles"] == 0
    if config.weighting.token_weighting == "none":  # the short contexts of others are not in the time model
        load = Machine(case.world_size, "H100", case.vocab_size, read_speeds()).attention(config, window)
        planned = rank_work(config, load, *sizes, head=stage == config.parallel.pipeline_model_parallel_size - 1)
        assert planned.flops == pytest.approx(sum(step["flops"].values()), rel=LARGEST_DIFFERENCE)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "every shape"])
def test_the_estimate_is_what_is_rehearsed(every: bool) -> None:
    """One recipe, or one stage of a recipe, is rehearsed for each shape: about 30 of 290."""
    cases = [case for recipe in known().values() for case in cases_of(recipe)] if every else [case_of(QUICK)]
    shapes = {shape_of(case): case for case in reversed(cases)}
    assert len(shapes) > 10 or not every
    for case in shapes.values():
        print(case.name)
        within(case)


def test_context_parallel_ranks_send_what_is_planned() -> None:
    """Rows of one document; ranks that hold whole windows exchange no keys, and so send only the rest of a step."""
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    sent = {}
    planned = {}
    for scheme in ("exchange", "ulysses"):
        argv = [*TINY.split(), *layout.split(), "--cp-scheme", scheme]
        config = parse(argv)
        steps = in_child(Request(argv, 4, 0, [128, 256], "whole"))["steps"]
        sent[scheme] = [step["collectives"]["CP"]["sent_bytes"] for step in steps]
        load = Machine(4, "H100", 1000, read_speeds()).attention(config, 256)
        planned[scheme] = rank_work(config, load, 4, 1000, head=True).context_bytes
    rest = sent["exchange"][0]
    assert sent["ulysses"][1] - rest == planned["ulysses"] > 0
    assert planned["exchange"] / 2 < sent["exchange"][1] - rest <= planned["exchange"]


@pytest.mark.slow
def test_many_short_segments() -> None:
    """Flash attention's scratch is the peak of a 1B model in rows of 32K under a window of 8."""
    case = case_of("skyladder_1b_32k")
    argv = [*case.argv, "--num-layers", "3", "--global-batch-size", "16", "--window-start", "8"]
    argv += ["--attention-backend", "torch_varlen"]
    (step,) = in_child(Request(argv, 8, 0, [8], "whole"))["steps"]
    assert "scratch" in step["peak_at"]
    memory = stage_memory(parse(argv), 8, case.vocab_size, 0, 8)
    assert memory.total == pytest.approx(sum(step["memory"].values()), rel=LARGEST_DIFFERENCE)


@pytest.mark.slow
def test_the_command(alone: Commands, tmp_path: Path) -> None:
    flags = [*TINY.split(), "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    words = ["--world-size", "4", "--windows", "32,full", "--json", str(tmp_path / "found.json"), *flags]
    (done,) = alone.attempt("tools/rehearse.py", *words)
    assert done.status == 0, done.stderr + done.stdout
    first, last = json.loads((tmp_path / "found.json").read_text())
    assert (first["rank"], first["place"]) == (0, "TP 0 PP 0 CP 0 DP 0")
    assert (last["rank"], last["place"]) == (2, "TP 0 PP 1 CP 0 DP 0")
    assert [step["window"] for step in first["steps"]] == [32, 256]
    assert {"TP", "PP"} <= set(last["steps"][0]["collectives"])
    assert "peak memory" in done.stdout


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--ranks", "4"], {}, "ranks: got '4', needs numbers 0..3 with commas between them, or stages"),
        (["--windows", "512"], {}, "windows: got '512', needs numbers 1..256 with commas between them, or full"),
        ([], {"CXX": "nothing"}, "compiler: found no CXX=nothing, a rehearsal builds one C++ file; install g++"),
        ([], {"CXX": "false"}, "compiler: /usr/bin/false cannot build cuda_mock.cpp"),
    ],
)  # fmt: skip
def test_what_cannot_be_rehearsed_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    flags = TINY.replace("batch-size 2", "batch-size 4").split()
    assert rehearse(["--world-size", "4", *words, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "flags",
    ["", pytest.param("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", marks=pytest.mark.slow)],
)
def test_micro_batches_that_are_not_run_count_like_those_that_are(flags: str) -> None:
    """FLOPs, bytes and memory of nine micro-batches, of which few are run, continue those of fewer, all of them run.

    In one process the optimizer's step has no FLOPs and nothing is sent: nine are three times three.
    """
    step_by_count = {}
    processes = 4 if flags else 1
    full = (5, 6) if flags else (3,)
    for count in (*full, 9):
        argv = [*TINY.split(), *flags.split(), "--global-batch-size", str(count)]
        (step_by_count[count],) = in_child(Request(argv, processes, 0, [256], "whole"))["steps"]
        assert step_by_count[count]["fault"] is None
    fewer = step_by_count[full[0]]
    more = step_by_count[full[-1]]
    of_nine = step_by_count[9]
    assert [step_by_count[count]["measured"] for count in (*full, 9)] == [*full, 4 if flags else 2]
    assert of_nine["microbatches"] == 9

    def continued(at_fewer: float, at_more: float) -> float:
        return at_more + (9 - full[1]) * (at_more - at_fewer) if flags else 3 * at_fewer

    for name, count in of_nine["flops"].items():
        assert count == pytest.approx(continued(fewer["flops"][name], more["flops"][name])), name
    for group, calls in of_nine["collectives"].items():
        sent = [step["collectives"][group]["sent_bytes"] for step in (fewer, more)]
        assert calls["sent_bytes"] == pytest.approx(continued(*sent)), group
    peaks = [sum(step["memory"].values()) for step in (fewer, more, of_nine)]
    if flags:
        assert peaks[2] == pytest.approx(continued(*peaks[:2]), abs=100)
    else:  # 256 tokens of six micro-batches more: tokens, labels and positions of 8 bytes, and whether they are trained
        assert peaks[2] - peaks[0] == pytest.approx(6 * 256 * 25, rel=0.01)
