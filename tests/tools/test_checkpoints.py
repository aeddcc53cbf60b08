"""tools/checkpoints.py lists what a run has saved, and finds what is damaged."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
from launcher import ROOT

STORED = ROOT / "tests" / "earlier" / "6f74073" / "run"
main = runpy.run_path(str(ROOT / "tools" / "checkpoints.py"))["main"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "run"))


def test_it_lists_checkpoints_and_what_lies_beside_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "iter_0000004.abc.incomplete").mkdir()
    assert main([str(run), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["2", "8"]
    assert "5.5658" in lines[2]
    assert "tensor 1, pipeline 1" in lines[2]
    assert lines[3] == f"--load {run} takes step 2"
    assert lines[4] == "iter_0000004.abc.incomplete: being written, or left by a kill"


def test_a_flipped_byte_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints" / "iter_0000002" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    assert main([str(run)]) == 0  # sizes alone
    assert main([str(run), "--verify"]) == 1
    assert "__0_0.distcp is damaged: its checksum differs" in capsys.readouterr().out
    file.unlink()
    assert main([str(run)]) == 1


def test_a_folder_without_checkpoints_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: holds no checkpoint, needs the folder that training got as --save; name that one\n"
    )
