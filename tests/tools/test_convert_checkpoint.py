"""tools/convert_checkpoint.py as a user calls it: real checkpoints of several layouts, and both models on a text."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.checkpoint.models import ARCHITECTURES, write_model
from tests.conftest import SmallData, slow_but
from tests.launcher import ROOT, Commands
from tests.runs import CONFIG, RunResult, launch, weight_error

TOOL = "tools/convert_checkpoint.py"
QUICK = ("llama", "qwen3-tied", "phi", "gemma3", "mixtral", "mixtral-top1", "deepseek_v3-top1-wide")
# others that differ from another one in shapes, or in angles that checkpoint/hf/test_rope.py compares
ALIKE = ("llama-tied", "llama-mha", "mistral", "mistral-uneven", "qwen3-local", "phi-tied", "dots1", "gemma3-global")
ALIKE += ("llama-linear", "llama-llama3")
BYTES = ("--tokenizer", "bytes", "--tokens", 60)
SHORT = ("--train-iters", 2, "--global-batch-size", 4, "--seq-length", 128, "--lr-warmup-iters", 0, "--lr", 1e-4)


def convert(commands: Commands, way: str, source: Path, output: Path, *flags: object) -> Path:
    commands.run(TOOL, way, "--input", source, "--output", output, *flags)
    return output


@pytest.fixture(scope="module")
def whole(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return launch([*small_data.flags, *SHORT], 1, tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        pytest.param(
            4,
            ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2, "--sequence-parallel"],
            id="tp2-pp2",
        ),
        pytest.param(
            2,
            ["--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1],
            id="interleaved",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_of_any_layout_exports_to_the_same(
    alone: Commands, small_data: SmallData, whole: RunResult, tmp_path: Path, processes: int, flags: list[object]
) -> None:
    """What the processes held at the end, bit for bit; and what one process has, to rounding."""
    run = launch([*small_data.flags, *SHORT, *flags], processes, tmp_path / "run")
    models = []
    for result, name in ((run, "model"), (whole, "whole")):
        export = convert(alone, "megatron-to-hf", result.folder, tmp_path / name)
        models.append(load_file(export / "model.safetensors"))
        final = result.weights("final")
        assert models[-1].keys() == final.keys()
        assert all(np.array_equal(models[-1][key], final[key]) for key in final)
    error, worst = weight_error(*models)
    assert error < 1e-5, worst
    assert (tmp_path / "model/tokenizer.json").read_bytes() == (small_data.tokenizer / "tokenizer.json").read_bytes()
    message = json.loads((tmp_path / "model/config.json").read_text())
    assert message["eos_token_id"] == small_data.eod
    assert message["bos_token_id"] is None
    verify = ("--input", tmp_path / "model", "--output", run.folder, "--tokens", 100)
    assert alone.attempt(TOOL, "verify", *verify)[0].status == 0


def test_bf16_is_exported_as_bf16(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = ROOT / "examples/configs/cpu_smoke.yaml"
    flags = ["--config", config, "--no-tensorboard", *small_data.flags, *SHORT, "--bf16", "--save", run]
    alone.run("pretrain_skyladder.py", *flags)
    export = convert(alone, "megatron-to-hf", run, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def logits_said(message: str) -> tuple[float, float]:
    """How large logits are, and how far those of both sides are apart, as `verify` says."""
    found = re.search(r"logits up to (\S+) in size\nlogits   largest difference (\S+) of", message)
    assert found is not None, message
    scale, difference = map(float, found.groups())
    return scale, difference


@pytest.mark.parametrize("architecture", slow_but(QUICK, [one for one in ARCHITECTURES if one not in ALIKE]))
def test_both_compute_the_same(alone: Commands, tmp_path: Path, architecture: str) -> None:
    """Logits to 1e-5 of the largest, loss to 1e-5 and greedy tokens, on a text longer than any local window."""
    model = write_model(tmp_path / "model", architecture)
    run = convert(alone, "hf-to-megatron", model, tmp_path / "run")
    verify = (TOOL, "verify", "--input", model, "--output", run, *BYTES)
    (done,) = alone.attempt(*verify)
    assert done.status == 0
    scale, difference = logits_said(done.stdout)
    assert difference <= 1e-5 * scale
    if architecture == "llama":
        assert alone.attempt(*verify, "--dtype", "bfloat16")[0].status == 0
        assert alone.attempt(TOOL, "verify", "--input", run, "--output", model, *BYTES)[0].status == 0


@pytest.mark.slow
def test_dynamic_angles_on_texts_beyond_the_original_length(
    alone: Commands, small_data: SmallData, tmp_path: Path
) -> None:
    """Longer rows have settled the base for every text; a model that had none follows the text's length."""
    run = tmp_path / "run"
    dynamic = ("--rope-scaling", "dynamic", "--rope-scaling-factor", 4, "--rope-original-length", 32)
    alone.run("pretrain_skyladder.py", *CONFIG, *small_data.flags, *SHORT, *dynamic, "--lr", 3e-3, "--save", run)
    export = convert(alone, "megatron-to-hf", run, tmp_path / "export")
    model = write_model(tmp_path / "model", "llama-dynamic", max_position_embeddings=32)
    converted = convert(alone, "hf-to-megatron", model, tmp_path / "converted")
    for tokens in (20, 60):
        for theirs, ours in ((export, run), (model, converted)):
            verify = ("--input", theirs, "--output", ours, "--tokens", tokens, "--tokenizer", "bytes")
            assert alone.attempt(TOOL, "verify", *verify)[0].status == 0, (ours, tokens)


def test_two_models_are_told_apart(alone: Commands, tmp_path: Path) -> None:
    model, name = write_model(tmp_path / "model", "llama"), "model.layers.3.input_layernorm.weight"
    run = convert(alone, "hf-to-megatron", model, tmp_path / "run")
    tensors = load_tensors(model / "model.safetensors")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    verify = (TOOL, "verify", "--input", model, "--output", run, *BYTES, "--dtype", "bfloat16")
    assert alone.attempt(*verify)[0].status == 1
    other = write_model(tmp_path / "other", "llama", vocab_size=301)
    (done,) = alone.attempt(TOOL, "verify", "--input", other, "--output", run, *BYTES)
    assert done.status == 2
    assert "got models with 301 and 300 token ids" in done.stderr


def test_training_goes_on_from_a_converted_model(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    """With its own config.yaml, under another layout too: the first losses are those of the Hugging Face folder."""
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"Once there was a {n}. " * 20}) + "\n" for n in "abcdef")
    )
    data = ("--input", tmp_path / "text.jsonl", "--output-prefix", tmp_path / "text")
    alone.run("tools/preprocess_data.py", *data, "--tokenizer-model", stories_model)
    run = convert(alone, "hf-to-megatron", stories_model, tmp_path / "run", "--make-vocab-size-divisible-by", 384)
    flags = ["--config", run / "config.yaml", "--data-path", tmp_path / "text", *SHORT, "--no-tensorboard"]
    flags += ["--split", "100,0,0"]
    losses = []
    for name, more in (("converted", []), ("original", ["--init-from", stories_model])):
        alone.run("pretrain_skyladder.py", *flags, *more, "--save", tmp_path / name)
        losses.append(RunResult(tmp_path / name, 0, "", "").series("lm_loss"))
    shared = launch([*flags, "--tensor-model-parallel-size", 2], 2, tmp_path / "tp2")
    (done,) = alone.attempt("pretrain_skyladder.py", *flags, "--load", run, "--init-from", "none")
    assert done.status == 2
    assert "holds weights alone, needs an optimizer's state; take it as --init-from" in done.stderr
    (done,) = alone.attempt("pretrain_skyladder.py", *flags, "--init-optimizer")
    assert done.status == 2
    assert "holds weights alone, needs an optimizer's state; leave --init-optimizer out" in done.stderr
    assert losses[0] == losses[1]
    assert shared.series("lm_loss") == pytest.approx(losses[0], abs=1e-5)
