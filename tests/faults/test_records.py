"""Records that process 0 cannot open: every process ends with the same line."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import SmallData
from launcher import Commands, Done
from runs import CONFIG, read_jsonl

SCRIPT = "pretrain_skyladder.py"
COMMON = [*CONFIG, "--seq-length", 64, "--window-schedule", "constant", "--lr-warmup-iters", 0, "--eval-interval", 0]


@pytest.fixture(scope="module")
def two() -> Commands:
    return Commands(2)


def check_refused(done: list[Done], text: str) -> None:
    assert [one.status for one in done] == [2, 2]
    for one in done:
        (line,) = [line for line in one.stderr.splitlines() if text in line]
        assert line == one.stderr.splitlines()[-1]
        assert "Traceback" not in one.stderr


def test_a_damaged_line_of_metrics(two: Commands, small_data: SmallData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [SCRIPT, *COMMON, *small_data.flags, "--save", run, "--lr-decay-iters", 4, "--save-interval", 2]
    two.run(*command, "--train-iters", 2)
    metrics, config = run / "metrics.jsonl", (run / "config.yaml").read_bytes()
    good = metrics.read_bytes()
    metrics.write_bytes(b"{not JSON\n" + good)
    longer = [*command, "--train-iters", 4, "--load", run]
    check_refused(two.attempt(*longer), f"{metrics}, line 1: got '{{not JSON', needs one JSON object")
    assert metrics.read_bytes() == b"{not JSON\n" + good
    assert (run / "config.yaml").read_bytes() == config
    metrics.write_bytes(good)
    two.run(*longer)
    assert len(read_jsonl(metrics)) == 4


def test_a_folder_where_a_file_belongs(two: Commands, small_data: SmallData, tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    command = [SCRIPT, *COMMON, *small_data.flags, "--train-iters", 1, "--save", tmp_path / "run"]
    check_refused(two.attempt(*command), "metrics.jsonl cannot be written (Is a directory); choose another folder or")
