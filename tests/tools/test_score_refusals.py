"""What scoring refuses, and what training refuses of a store: one clear line each, exit status 2, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SmallData
from launcher import Commands
from runs import CONFIG
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SCORE, TRAIN = "tools/score_tokens.py", "pretrain_skyladder.py"
LENGTH, ROWS = 64, 4
RUN = [*CONFIG, "--window-schedule", "constant", "--lr-warmup-iters", "0"]
RUN += ["--seq-length", LENGTH, "--train-iters", 2, "--global-batch-size", 2]
SHORT = ["--context", 16, "--stride", 12]
Prepare = Callable[[Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that knows more token ids than the data has."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=1031, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """One that may be spoilt."""
    return shutil.copytree(model, tmp_path / "copy")


def refusal(commands: Commands, script: str, *flags: object) -> str:
    """The one line, beside those of its log, that the command says before it leaves with 2."""
    (done,) = commands.attempt(script, *flags)
    assert done.status == 2, done.stderr
    *log, line = done.stderr.splitlines()
    assert all(logged.startswith("attention backend: ") for logged in log), done.stderr
    return line


def config(**changed: Any) -> Prepare:
    """Other values in config.json."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | changed
        (folder / "config.json").write_text(json.dumps(content))

    return change


def tensors(**changed: Any) -> Prepare:
    """Other tensors in the file, by the end of their names; None removes one."""

    def change(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        for end, tensor in changed.items():
            name = next((name for name in found if name.endswith(f"{end}.weight")), end)
            found.pop(name, None)
            found |= {} if tensor is None else {name: tensor}
        save_file(found, folder / "model.safetensors")

    return change


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def torn(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (removed, "is neither a Hugging Face model folder nor holds a checkpoint; check the path"),
        (config(model_type="gpt_neox"), "has model_type 'gpt_neox', needs one of llama, qwen2, qwen3"),
        (config(vocab_size=1000), "knows 1000 token ids, needs at least the 1024 of the data; give a scorer of"),
        (tensors(q_proj=None), "has no tensor model.layers.0.self_attn.q_proj.weight"),
        pytest.param(torn, "model.safetensors"),
    ],
)
def test_a_checkpoint_that_cannot_score(
    alone: Commands, small_data: SmallData, copy: Path, tmp_path: Path, spoil: Prepare, text: str
) -> None:
    store = tmp_path / "store"
    flags = ["--checkpoint", copy, *RUN, *small_data.flags, *SHORT, "--rows", 1, "--output", store]
    alone.run(SCORE, *flags)
    shutil.rmtree(store)
    spoil(copy)
    error = refusal(alone, SCORE, *flags)
    assert text in error
    assert str(copy) in error
    assert error.startswith(("error: checkpoint: ", "error: load: "))
    assert not list(tmp_path.glob("store*"))


@pytest.fixture(scope="module")
def store(
    alone: Commands, small_data: SmallData, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[object]]:
    """A store of the whole run, and the flags that made it."""
    path = tmp_path_factory.mktemp("store") / "store"
    flags = ["--checkpoint", model, *RUN, *small_data.flags, *SHORT]
    alone.run(SCORE, *flags, "--output", path)
    return path, flags


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--context", 17], "its short_context is 16, but these rows have 17"),
        (["--document-mask"], "inside documents"),
    ],
)
def test_a_store_of_something_else_is_left_alone(
    alone: Commands, store: tuple[Path, list[object]], flags: list[object], text: str
) -> None:
    path, made = store
    before = contents(path)
    error = refusal(alone, SCORE, *made, "--output", path, *flags)
    assert error.startswith(f"error: score store {path}: its ")
    assert text in error
    assert contents(path) == before
    alone.run(SCORE, *made, "--output", path)
    assert contents(path) == before


def test_another_scorer_needs_another_store(alone: Commands, store: tuple[Path, list[object]], copy: Path) -> None:
    path, made = store
    alone.run(SCORE, *made, "--checkpoint", copy, "--output", path)  # a copy is the same model
    tensors(norm=torch.full((16,), 1.5))(copy)
    assert ": its model is " in refusal(alone, SCORE, *made, "--checkpoint", copy, "--output", path)


def frozen(data: list[str], path: Path) -> list[object]:
    return [*RUN, *data, "--token-weighting", "frozen", "--score-store", path]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--seed", 7], "its seed is 1234, but this run needs 7"),
        (["--train-iters", 3], "its rows are 4, but this run needs at least 6"),
        (["--split", "90,10,0"], "split 9/10,1/10,0"),
        (["--tokenizer-model", "none", "--vocab-size", 1024], "but this run needs none"),
    ],
)
def test_training_refuses_a_store_of_other_rows(
    alone: Commands, small_data: SmallData, store: tuple[Path, list[object]], flags: list[object], text: str
) -> None:
    error = refusal(alone, TRAIN, *frozen(small_data.flags, store[0]), *flags)
    assert error.startswith(f"error: score store {store[0]}: its ")
    assert text in error


def test_data_count_by_content(
    alone: Commands, small_data: SmallData, store: tuple[Path, list[object]], tmp_path: Path
) -> None:
    """The same tokens under another name are the same rows; with one token changed they are not."""
    for suffix in (".bin", ".idx"):
        shutil.copy(small_data.prefix.with_suffix(suffix), tmp_path / f"other{suffix}")
    run = [*frozen(small_data.flags, store[0]), "--data-path", tmp_path / "other"]
    alone.run(TRAIN, *run)
    tokens = np.fromfile(tmp_path / "other.bin", dtype=np.uint16)
    tokens[len(tokens) // 2] ^= 1
    tokens.tofile(tmp_path / "other.bin")
    assert ": its data is " in refusal(alone, TRAIN, *run)


def test_training_refuses_a_store_with_holes(
    alone: Commands, small_data: SmallData, store: tuple[Path, list[object]], tmp_path: Path
) -> None:
    """A row that is missing is told at once; a damaged one when it is read. Scoring again mends both."""
    holes = shutil.copytree(store[0], tmp_path / "holes")
    run, again = frozen(small_data.flags, holes), [*store[1], "--output", holes]
    (holes / "c.1.0").unlink()
    assert "1 of the 4 rows that this run needs are missing, row 1 the first; run the scoring" in refusal(
        alone, TRAIN, *run
    )
    alone.run(SCORE, *again)
    content = bytearray((holes / "c.3.0").read_bytes())
    content[20] ^= 1
    (holes / "c.3.0").write_bytes(content)
    (done,) = alone.attempt(TRAIN, *run)
    assert done.status == 2
    assert f"score store {holes}: row 3 is damaged" in done.stderr.splitlines()[-1]  # after the first step's line
    alone.run(SCORE, *again)
    assert contents(holes) == contents(store[0])
    alone.run(TRAIN, *run, "--train-iters", 1)  # a store may have more rows than a run
