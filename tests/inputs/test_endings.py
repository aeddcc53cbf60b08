"""The last line of a run, and the notes of runs that have nothing left to do or two sources of weights."""

from pathlib import Path

from tests.conftest import SmallData
from tests.launcher import Commands
from tests.runs import CONFIG, TRAINER

RUN = [*CONFIG, "--seq-length", 64, "--train-iters", 2, "--lr-warmup-iters", 0, "--window-schedule", "constant"]


def test_rows_longer_than_the_corpus_are_noted(alone: Commands, tmp_path: Path) -> None:
    """Each row repeats it; told once, and not of what fills a row."""
    (tmp_path / "text.jsonl").write_text('{"text": "one two three"}\n' * 6)
    made = ("--input", tmp_path / "text.jsonl", "--output-prefix", tmp_path / "data", "--tokenizer-model", "bytes")
    alone.run("tools/preprocess_data.py", *made)
    flags = [*CONFIG, "--data-path", tmp_path / "data", "--tokenizer-model", "bytes", "--train-iters", 2]
    flags += ["--window-schedule", "constant", "--lr-warmup-iters", 0, "--split", "100,0,0"]
    for length, times in ((64, 0), (96, 1)):  # of 84 tokens
        (done,) = alone.attempt(TRAINER, *flags, "--seq-length", length)
        assert done.status == 0, done.stderr
        assert done.stderr.count("has 84 tokens, which each row of 96 repeats") == times


def test_the_run_of_load_goes_on_whatever_init_from_says(
    alone: Commands, small_data: SmallData, tmp_path: Path
) -> None:
    run, flags = tmp_path / "a run", [*RUN, *small_data.flags]
    (first,) = alone.attempt(TRAINER, *flags, "--save", run)
    assert first.status == 0, first.stderr
    *_, last = first.stderr.strip().splitlines()
    assert last.startswith(f"done: the model after 2 steps is in {run / 'checkpoints' / 'iter_0000002'}; ")
    assert f"megatron-to-hf --input '{run}'" in last  # can be copied

    begin = ["--save", tmp_path / "new", "--init-from", run, "--load", run]
    left = tmp_path / "new" / "checkpoints" / "iter_0000001.1f0a2b3c.deleted.incomplete"  # by a killed run
    left.mkdir(parents=True)
    (both,) = alone.attempt(TRAINER, *flags, *begin)
    assert both.status == 0, both.stderr
    assert not left.exists()
    assert "nothing is left to do: all 2 steps were done before; raise --train-iters for more" in both.stderr
    assert "done: " not in both.stderr
    (chosen,) = alone.attempt(TRAINER, *flags, *begin, "--load", "none")
    assert chosen.status == 0, chosen.stderr
    assert f"weights from {run}" in chosen.stderr
