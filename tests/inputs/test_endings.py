"""The last line of a run, and the notes of runs that have nothing left to do or two sources of weights."""

from __future__ import annotations

from pathlib import Path

from conftest import SmallData
from launcher import Commands
from runs import CONFIG, TRAINER

RUN = [*CONFIG, "--seq-length", 64, "--train-iters", 2, "--lr-warmup-iters", 0, "--window-schedule", "constant"]


def test_the_last_line_names_the_model_and_the_next_commands(
    alone: Commands, small_data: SmallData, tmp_path: Path
) -> None:
    run, flags = tmp_path / "a run", [*RUN, *small_data.flags]
    (first,) = alone.attempt(TRAINER, *flags, "--save", run)
    assert first.status == 0, first.stderr
    *_, last = first.stderr.strip().splitlines()
    checkpoint = run / "checkpoints" / "iter_0000002"
    assert last.startswith(f"done: the model after 2 steps is in {checkpoint}; ")
    assert f"tools/report.py '{run}'" in last
    assert f"megatron-to-hf --input '{run}'" in last

    (again,) = alone.attempt(TRAINER, *flags, "--save", run, "--load", run)
    assert again.status == 0, again.stderr
    assert "nothing is left to do: all 2 steps were done before; --train-iters N for more" in again.stderr
    assert "done: " not in again.stderr

    begin = ["--save", tmp_path / "new", "--init-from", run, "--load", run]
    (both,) = alone.attempt(TRAINER, *flags, *begin)
    assert both.status == 0, both.stderr
    warning = f"warning: init_from: got {run}, but the run continues from {checkpoint}, as load says; add --load none"
    assert warning in both.stderr
    (chosen,) = alone.attempt(TRAINER, *flags, *begin, "--load", "none")
    assert chosen.status == 0, chosen.stderr
    assert f"weights from {checkpoint}" in chosen.stderr
    assert "warning: init_from" not in chosen.stderr
