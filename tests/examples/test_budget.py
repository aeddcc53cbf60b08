"""docs/experiments/budget.py: its runs, its test on made-up losses, and the whole command at the smallest scale."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "docs" / "experiments"


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The experiment's module; scipy and matplotlib, which it imports, take seconds."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("budget")


def test_every_experiment_can_be_imported() -> None:
    """In a process of its own: a package of the tests has the name of an experiment."""
    names = " ".join(path.stem for path in EXPERIMENTS.glob("*.py"))
    command = [sys.executable, "-c", f"import {names.replace(' ', ', ')}"]
    subprocess.run(command, cwd=EXPERIMENTS, env=os.environ | {"PYTHONPATH": str(EXPERIMENTS.parents[1])}, check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_experiment_at_its_smallest_scale(budget: Any, tmp_path: Path) -> None:
    """Two seeds of four steps; called again, it trains nothing and writes the same page."""
    novels, out = tmp_path / "novels", tmp_path / "out"
    novels.mkdir()
    for number, name in enumerate(("one", "two", *importlib.import_module("harness").HELD_OUT_NOVELS)):
        draw = np.random.default_rng(number)
        lines = [" ".join(draw.choice(["park", "dog", "Lily", "went", "saw"], 12)) + "\n" for _ in range(2000)]
        (novels / f"{name}.txt").write_text("".join(lines))
    command = [sys.executable, ROOT / "docs/experiments/budget.py", novels, out, "--steps", "4", "--seeds", "1", "2"]
    command += ["--rates", "2e-3", "--held-out", "3"]
    found = []
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        written = {path: path.stat().st_mtime_ns for path in out.glob("seed_*/*/metrics.jsonl")}
        found.append(((out / "results" / "budget.md").read_text(), written))
    assert found[0] == found[1]
    assert len(written) == 12
    numbers = json.loads((out / "results" / "budget.json").read_text())
    assert len(numbers["b"]["tests"]["512"]["slopes"]) == 2
    assert (out / "results" / "budget.png").stat().st_size > 0
