"""A validation set without trained tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from launcher import Commands
from runs import CONFIG, read_jsonl

from megatron_ext.monitoring.report import write_report
from tests.theirs import write_theirs

TRAINER = "pretrain_skyladder.py"
SHORT = [*CONFIG, "--train-iters", 2, "--seq-length", 64, "--lr-warmup-iters", 0, "--window-schedule", "constant"]


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
