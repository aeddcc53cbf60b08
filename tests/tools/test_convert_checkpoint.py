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
from tests.launcher import Commands
from tests.runs import CONFIG, launch, refused_command, series

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


PP2 = ("--pipeline-model-parallel-size", 2)
LAYOUTS = {
    "tp2-pp2": (4, (*PP2, "--tensor-model-parallel-size", 2, "--sequence-parallel")),
    "interleaved": (2, (*PP2, "--num-layers-per-virtual-pipeline-stage", 1)),
    "uneven": (2, (*PP2, "--pipeline-model-parallel-layout", "E|tt|t|tL")),
}


@pytest.mark.parametrize("layout", slow_but(["tp2-pp2"], LAYOUTS))
def test_layouts_export_what_they_hold(alone: Commands, small_data: SmallData, tmp_path: Path, layout: str) -> None:
    processes, flags = LAYOUTS[layout]
    run = launch([*small_data.flags, *SHORT, *flags], processes, tmp_path / "run")
    export = convert(alone, "megatron-to-hf", run.folder, tmp_path / "model")
    final = run.weights("final")
    model = load_file(export / "model.safetensors")
    assert model.keys() == final.keys()
    assert all(np.array_equal(model[key], final[key]) for key in final)
    assert (tmp_path / "model/tokenizer.json").read_bytes() == (small_data.tokenizer / "tokenizer.json").read_bytes()
    entries = json.loads((tmp_path / "model/config.json").read_text())
    assert (entries["eos_token_id"], entries["bos_token_id"]) == (small_data.eod, None)
    alone.run(TOOL, "verify", "--input", tmp_path / "model", "--output", run.folder, "--tokens", 100)


def test_bf16_is_exported_as_bf16(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    alone.run("pretrain_skyladder.py", *CONFIG, *small_data.flags, *SHORT, "--bf16", "--save", run)
    export = convert(alone, "megatron-to-hf", run, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("architecture", slow_but(QUICK, [name for name in ARCHITECTURES if name not in ALIKE]))
def test_both_compute_the_same(alone: Commands, tmp_path: Path, architecture: str) -> None:
    """Logits to 1e-5 of the largest, loss to 1e-5 and greedy tokens, on a text longer than any local window."""
    model = write_model(tmp_path / "model", architecture)
    run = convert(alone, "hf-to-megatron", model, tmp_path / "run")
    verify = (TOOL, "verify", "--input", model, "--output", run, *BYTES)
    (done,) = alone.run(*verify)
    match = re.search(r"logits up to (\S+) in size\nlogits   largest difference (\S+) of", done.stdout)
    assert match is not None, done.stdout
    assert float(match[2]) <= 1e-5 * float(match[1])
    if architecture == "llama":
        alone.run(*verify, "--dtype", "bfloat16")
        alone.run(TOOL, "verify", "--input", run, "--output", model, *BYTES)


def test_two_models_are_told_apart(alone: Commands, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    name = "model.layers.3.input_layernorm.weight"
    run = convert(alone, "hf-to-megatron", model, tmp_path / "run")
    tensors = load_tensors(model / "model.safetensors")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    verify = (TOOL, "verify", "--input", model, "--output", run, *BYTES, "--dtype", "bfloat16")
    assert alone.attempt(*verify)[0].status == 1
    other_model = write_model(tmp_path / "other", "llama", vocab_size=301)
    message = refused_command(alone, TOOL, "verify", "--input", other_model, "--output", run, *BYTES)
    assert "got models with 301 and 300 token ids" in message


def test_training_goes_on_from_a_converted_model(alone: Commands, stories_model: Path, tmp_path: Path) -> None:
    """It has its own config.yaml and another layout too: the first losses equal the Hugging Face folder's."""
    lines = [json.dumps({"text": f"Once there was a {name}. " * 20}) + "\n" for name in "abcdef"]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    data = ("--input", tmp_path / "text.jsonl", "--output-prefix", tmp_path / "text")
    alone.run("tools/preprocess_data.py", *data, "--tokenizer-model", stories_model)
    run = convert(alone, "hf-to-megatron", stories_model, tmp_path / "run", "--make-vocab-size-divisible-by", 384)
    flags = ["--config", run / "config.yaml", "--data-path", tmp_path / "text", "--split", "100,0,0", *SHORT]
    flags += ["--no-tensorboard"]
    losses = []
    for name, more in (("converted", []), ("original", ["--init-from", stories_model])):
        alone.run("pretrain_skyladder.py", *flags, *more, "--save", tmp_path / name)
        losses.append(series(tmp_path / name, "lm_loss"))
    shared = launch([*flags, "--tensor-model-parallel-size", 2], 2, tmp_path / "tp2")
    for wrong in (["--load", run, "--init-from", "none"], ["--init-optimizer"]):
        message = refused_command(alone, "pretrain_skyladder.py", *flags, *wrong)
        assert "holds weights alone, needs an optimizer's state; " in message
    assert losses[0] == losses[1]
    assert shared.series("lm_loss") == pytest.approx(losses[0], abs=1e-5)
