"""benchmarks/gpu.sh without a GPU: every part runs with small sizes, finds nothing wrong and says what it skips."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_dry_run_of_all_parts(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    environment = os.environ | {"OUTPUT": str(output)}
    command = [ROOT / "benchmarks" / "gpu.sh"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {record["part"] for record in records} == {"machine", "correct", "attention", "step", "length", "loss_head"}
    assert not [record for record in records if record.get("ok") is False]
    skipped = {
        record["backend"]: record["skipped"] for record in records if "skipped" in record and "backend" in record
    }
    assert skipped.keys() == {"triton_packed", "torch_varlen", "flash_attn_4", "te_thd", "flash_attn"}
    assert "runs on cuda, not on cpu" in skipped["triton_packed"]
    assert "is not installed; pip install" in skipped["flash_attn"]
