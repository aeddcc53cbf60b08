"""Extreme values: the largest seed, and a validation set without trained tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from conftest import SmallData
from launcher import Commands
from runs import CONFIG, read_jsonl

from megatron_ext.monitoring.report import write_report
from tests.theirs import write_theirs

TRAINER = "pretrain_skyladder.py"
SHORT = [*CONFIG, "--train-iters", 2, "--seq-length", 64, "--lr-warmup-iters", 0, "--window-schedule", "constant"]


def test_the_largest_seed(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    """Weights, order of a mixture's parts, drawn weights and dropout, which Megatron seeds with offsets."""
    parts = ["--data-path", 0.5, small_data.prefix, 0.5, small_data.prefix, *small_data.flags[2:]]
    weighted = ["--token-weighting", "unfrozen", "--short-context", 16, "--weight-post", "sparse"]
    losses = []
    for seed in (2**64 - 1, 2**64 - 2):
        flags = [*SHORT, *parts, *weighted, "--hidden-dropout", 0.1, "--seed", seed]
        alone.run(TRAINER, *flags, "--save", tmp_path / str(seed))
        losses.append([record["lm_loss"] for record in read_jsonl(tmp_path / str(seed) / "metrics.jsonl")])
    assert losses[0] != losses[1]
    (done,) = alone.attempt(TRAINER, *SHORT, *parts, "--seed", 2**64 - 1, "--dry-run", "strict")
    assert (done.status, done.stderr) == (0, "")


def test_a_validation_without_a_trained_token_has_no_loss(alone: Commands, tmp_path: Path) -> None:
    """Documents of one token each, whose following tokens --eod-mask-loss leaves out."""
    write_theirs(tmp_path / "ends", [np.array([7])] * 2000, 300)
    run, flags = tmp_path / "run", ["--data-path", tmp_path / "ends", "--tokenizer-model", "bytes", "--eod-mask-loss"]
    flags += ["--split", "50,50,0", "--eval-interval", 1, "--eval-iters", 1, "--eval-lengths", 32, 64, "--save", run]
    (done,) = alone.attempt(TRAINER, *SHORT, *flags)
    assert done.status == 0, done.stderr
    for record in read_jsonl(run / "evaluation.jsonl"):
        assert (record["valid_loss"], record["valid_perplexity"]) == (None, None)
        assert (record["by_length"], record["by_position"]) == ({"32": None, "64": None}, {})
    assert done.stderr.count("no trained token in its rows, so its loss is null (logged once)") == 1
    assert "not evaluated" in write_report(run).read_text()
