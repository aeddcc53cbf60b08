"""What commit 6f74073 wrote still works: a dataset, a checkpoint, a score store, a packing plan, an exported model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from launcher import ROOT, Commands
from runs import read_jsonl, relative
from safetensors.numpy import load_file

SAMPLES = Path(__file__).with_name("6f74073")
SMALL = """
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --num-query-groups 1
    --make-vocab-size-divisible-by 2 --data-path corpus --tokenizer-model bytes --seq-length 64
    --global-batch-size 4 --train-iters 4 --window-start 8 --window-rate 16 --lr-warmup-iters 1 --document-mask
"""
FLAGS = ["--config", ROOT / "examples" / "configs" / "cpu_smoke.yaml", "--no-tensorboard", *SMALL.split()]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to work in."""
    folder = tmp_path_factory.mktemp("earlier") / "samples"
    shutil.copytree(SAMPLES, folder)
    return folder


@pytest.fixture(scope="module")
def commands(samples: Path) -> Commands:
    return Commands(folder=samples)


def losses(run: Path, first: int = 0) -> list[float]:
    return [record["lm_loss"] for record in read_jsonl(run / "metrics.jsonl")][first:]


def assert_same_weights(ours: Path, theirs: Path) -> None:
    mine, stored = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert mine.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_allclose(mine[name], tensor, atol=1e-6 * np.abs(tensor).max(), rtol=0, err_msg=name)


def test_a_run_on_its_dataset_is_the_same(commands: Commands, samples: Path) -> None:
    commands.run("pretrain_skyladder.py", *FLAGS, "--save", "again")
    assert relative(losses(samples / "again"), losses(samples / "run")) <= 1e-6


def test_its_checkpoint_goes_on_to_the_same_model(commands: Commands, samples: Path) -> None:
    commands.run("pretrain_skyladder.py", *FLAGS, "--load", "run", "--save", "resumed")
    assert relative(losses(samples / "resumed"), losses(samples / "run", first=2)) <= 1e-6
    convert = ["megatron-to-hf", "--input", "resumed", "--output", "resumed-hf", "--tokenizer", "none"]
    commands.run("tools/convert_checkpoint.py", *convert)
    assert_same_weights(samples / "resumed-hf", samples / "hf")


def test_its_exported_model_is_bit_equal_after_both_conversions(commands: Commands, samples: Path) -> None:
    commands.run("tools/convert_checkpoint.py", "hf-to-megatron", "--input", "hf", "--output", "imported")
    back = ["megatron-to-hf", "--input", "imported", "--output", "back", "--tokenizer", "none"]
    commands.run("tools/convert_checkpoint.py", *back)
    mine, stored = load_file(samples / "back" / "model.safetensors"), load_file(samples / "hf" / "model.safetensors")
    assert mine.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(mine[name], tensor, err_msg=name)


def test_its_score_store_weights_the_same_tokens(commands: Commands, samples: Path) -> None:
    frozen = ["--token-weighting", "frozen", "--score-store", "scores.zarr"]
    commands.run("pretrain_skyladder.py", *FLAGS, *frozen, "--save", "weighted-again")
    again, stored = (read_jsonl(samples / name / "metrics.jsonl") for name in ("weighted-again", "weighted"))
    for key in ("train_loss", "weight_std", "score_mean"):
        assert relative([record[key] for record in again], [record[key] for record in stored]) <= 1e-5, key


def test_its_packing_plan_is_found(commands: Commands, samples: Path) -> None:
    commands.run("pretrain_skyladder.py", *FLAGS, "--packing", "best_fit", "--save", "packed")
    assert len(losses(samples / "packed")) == 4
