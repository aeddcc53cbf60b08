"""tools/simulate_run.py as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ("--config", "examples/configs/skyladder/skyladder_1b_8k.yaml", "--gpus", "32", "--documents", "drawn")
SMALL = ("--moments", "3", "--steps", "2", "--most-rows", "16", "--pipeline-model-parallel-size", "2")


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/simulate_run.py", *CONFIG, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow  # two runs; tests/planning/test_pictures.py has a quick one
def test_a_run_is_simulated_and_the_same_each_time() -> None:
    done, again = simulate(*SMALL), simulate(*SMALL)
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    windows = [int(line[1].replace(",", "")) for line in table[:3]]
    assert windows == sorted(windows)
    assert windows[0] < windows[-1] == 8192
    seconds = [float(line[2]) for line in table[:3]]
    assert seconds[0] < seconds[-1]
    assert done.stdout.count("best") == 2  # of synchronous and of asynchronous saves
    assert done.stdout.split("simulated in")[0] == again.stdout.split("simulated in")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H300"], "gpu: got 'H300', needs one of"),
        (["--rehearsal", "a.json"], "rehearsal: got a file, but no page that shows it; add --html FILE"),
        pytest.param(["--moments", "0"], "moments: got 0, needs 1 or more", marks=pytest.mark.slow),
        pytest.param(["--cluster-file", "none.yaml"], "none.yaml", marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    done = simulate(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
