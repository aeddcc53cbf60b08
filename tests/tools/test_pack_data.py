"""Plans made by the tool are what the trainer reads; without one it says how to make it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SmallData
from parity.launch import SCRIPT, attempt, read_jsonl

TOOL = SCRIPT.parent / "tools" / "pack_data.py"


def pack(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def copied(data: SmallData, folder: Path) -> list[object]:
    """Flags for a data set of its own, so that plans of other tests do not lie beside it."""
    for suffix in (".bin", ".idx"):
        (folder / f"corpus{suffix}").write_bytes(Path(f"{data.prefix}{suffix}").read_bytes())
    flags = ["--data-path", folder / "corpus", "--tokenizer-model", data.tokenizer, "--seq-length", 128]
    return [*flags, "--train-iters", 2, "--lr-warmup-iters", 1, "--document-mask", "--eval-interval", 0]


@pytest.mark.parametrize("policy", ["best_fit", "carry_over"])
def test_a_run_reads_the_plan_that_its_flags_made(small_data: SmallData, tmp_path: Path, policy: str) -> None:
    flags = [*copied(small_data, tmp_path), "--packing", policy]
    missing = attempt(flags, 1, tmp_path / "without")
    assert missing.returncode == 2
    assert f"has no {policy} plan for seq_length 128" in missing.stderr.splitlines()[-1]
    made = pack(*flags)
    assert made.returncode == 0, made.stderr
    assert "100.0%" in next(line for line in made.stdout.splitlines() if "tokens kept" in line)
    run = attempt(flags, 1, tmp_path / "run")
    assert run.returncode == 0, run.stderr
    assert len(read_jsonl(run.folder / "metrics.jsonl")) == 2
    other = attempt([*flags, "--seed", 77], 1, tmp_path / "other")
    assert other.returncode == 2


def test_random_needs_no_plan(small_data: SmallData) -> None:
    refused = pack(*small_data.flags, "--packing", "random")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: packing: got random")
