"""tools/checkpoints.py lists what a run has saved, and finds what is damaged."""

import json
import runpy
from pathlib import Path

import pytest

from megatron_ext.checkpoint.manifest import Manifest, facts_of
from tests.launcher import ROOT

main = runpy.run_path(str(ROOT / "tools" / "checkpoints.py"))["main"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "iter_0000002"
    folder.mkdir(parents=True)
    (folder / "tensors_00000.safetensors").write_bytes(bytes(2000))
    files = {"tensors_00000.safetensors": facts_of(folder / "tensors_00000.safetensors")}
    layout = {"tensor": 1, "pipeline": 1}
    Manifest(2, 8, layout, config={}, optimizer={"step": 2}, code={}, files=files, seconds=0.1).write(folder)
    metrics = [{"step": step, "lm_loss": loss} for step, loss in enumerate((5.7, 5.5658))]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    return tmp_path / "run"


def test_it_lists_checkpoints_and_what_lies_beside_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "iter_0000004.abc.incomplete").mkdir()
    assert main([str(run), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["2", "8"]
    assert "5.5658" in lines[2]
    assert "tensor 1, pipeline 1" in lines[2]
    assert lines[3] == f"--load {run} takes step 2"
    assert lines[4].startswith("iter_0000004.abc.incomplete: ")


def test_a_flipped_byte_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints" / "iter_0000002" / "tensors_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    assert main([str(run)]) == 0  # sizes alone
    assert main([str(run), "--verify"]) == 1
    assert "tensors_00000.safetensors is damaged: its checksum differs" in capsys.readouterr().out
    file.unlink()
    assert main([str(run)]) == 1
