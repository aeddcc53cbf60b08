"""The last line of a run, and the notes of runs that have nothing left to do or two sources of weights."""

from pathlib import Path

import numpy as np

from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER
from tests.theirs import write_theirs

RUN = [*CONFIG, "--seq-length", 64, "--train-iters", 2, "--lr-warmup-iters", 0, "--window-schedule", "constant"]


def test_rows_longer_than_the_corpus_are_noted(alone: Commands, tmp_path: Path) -> None:
    """Once, and not where it fills a row."""
    write_theirs(tmp_path / "data", [np.arange(14)] * 6, 257)
    flags = [*RUN, "--data-path", tmp_path / "data", "--tokenizer-model", "bytes", "--split", "100,0,0"]
    for length, times in ((64, 0), (96, 1)):  # of 84 tokens
        (done,) = alone.run(TRAINER, *flags, "--seq-length", length)
        assert done.stderr.count("has 84 tokens, which each row of 96 repeats") == times


def test_load_comes_before_init_from(alone: Commands, small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    flags = [*RUN, *small_data.flags]
    (first,) = alone.run(TRAINER, *flags, "--save", run)
    *_, last = first.stderr.strip().splitlines()
    assert last.startswith(f"done: the model after 2 steps is in {run / 'checkpoints' / 'iter_0000002'}; ")
    assert f"megatron-to-hf --input '{run}'" in last  # can be copied

    begin = ["--save", tmp_path / "new", "--init-from", run, "--load", run]
    leftover = tmp_path / "new" / "checkpoints" / "iter_0000001.1f0a2b3c.deleted.incomplete"  # by a killed run
    leftover.mkdir(parents=True)
    (loaded,) = alone.run(TRAINER, *flags, *begin)
    assert not leftover.exists()
    assert "nothing is left to do: all 2 steps were done before; raise --train-iters for more" in loaded.stderr
    assert "done: " not in loaded.stderr
    (chosen,) = alone.run(TRAINER, *flags, *begin, "--load", "none")
    assert f"weights from {run}" in chosen.stderr
    assert "rotates other angles" not in chosen.stderr
    other = [*flags, "--init-from", run, "--rotary-base", 5e5, "--save", tmp_path / "other"]
    (dry,) = alone.run(TRAINER, *other, "--dry-run")
    (trained,) = alone.run(TRAINER, *other)
    for text in (dry.stdout, trained.stderr):
        assert "rotates other angles than these weights were trained with: rotary_base 10000.0 -> 500000.0" in text
