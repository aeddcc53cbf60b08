"""tests/walk.py: what it calls different, and its rows on a real model."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import ROOT
from walk import distance

ROWS = "convert,perplexity,generate,score,pretrain,replay,checkpoints"


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ({"a": [1.0, "x"]}, {"a": [1.5, "x"]}, 0.5),
        ([math.nan, 2.0], [math.nan, 2.0], 0),
        ([math.nan], [0.0], math.inf),
        ([[1, 2]], [[1, 3]], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ({"a": 1.0}, {"b": 1.0}, math.inf),
        ("text", "texts", math.inf),
    ],
)
def test_what_is_different(a: Any, b: Any, apart: float) -> None:
    assert distance(a, b) == apart


@pytest.mark.slow
def test_a_real_model_through_the_commands(stories_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "tests/walk.py", str(tmp_path), "--models", "stories", "--only", ROWS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing differs"
    table = (tmp_path / "walk.md").read_text()
    for cells in ("| generate, greedy | stories |", "| score_tokens | stories |", "| replay_step | stories |"):
        assert cells in table
