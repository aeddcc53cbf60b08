"""benchmarks/gpu.sh without a GPU: every part runs with small sizes and finds nothing wrong."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_dry_run_of_all_parts(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    environment = os.environ | {"OUTPUT": str(output), "CUDA_VISIBLE_DEVICES": ""}
    command = [ROOT / "benchmarks" / "gpu.sh"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {record["part"] for record in records} == {"correct", "attention", "step", "length", "loss_head"}
    assert not [record for record in records if record.get("ok") is False]
