"""Records that process 0 cannot open: every process ends with that line."""

from __future__ import annotations

from pathlib import Path

from conftest import SmallData
from launcher import Commands
from runs import CONFIG, TRAINER, refusal


def test_a_folder_where_a_file_belongs(small_data: SmallData, tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    command = [*small_data.flags, "--seq-length", 64, "--save", tmp_path / "run"]
    for done in Commands(2).attempt(TRAINER, *CONFIG, *command):
        assert "metrics.jsonl cannot be written (Is a directory); choose another folder or" in refusal(done)
