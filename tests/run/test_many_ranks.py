"""What a step costs a rank does not depend on how many ranks there are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SmallData
from tests.runs import CONFIG

ROOT = Path(__file__).resolve().parents[2]
ROUNDING = 2**17  # bytes: where a step has more rows than the data, it draws an epoch's order, 80 KB
OBJECTS = "allgather"  # Megatron-Core's optimizer gathers the parameter groups of all ranks at the start


def costs(data: SmallData, world_size: int, *flags: object) -> dict[str, Any]:
    """What `many_ranks` prints, with a row for each data-parallel rank."""
    sizes = ["--seq-length", 128, "--window-start", 16, "--window-rate", 100, "--train-iters", 10]
    rows = ["--micro-batch-size", 1, "--global-batch-size", world_size]
    words = [*CONFIG, *data.flags, *sizes, *rows, *flags]
    command = [sys.executable, "-m", "tests.run.many_ranks", str(world_size), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [512, 1024, 16384])
def test_a_step_costs_as_much_among_many_ranks(small_data: SmallData, world_size: int) -> None:
    few, many = costs(small_data, 64), costs(small_data, world_size)
    for one, other in zip(few["steps"], many["steps"], strict=True):
        assert other["collectives"] == one["collectives"] != []
    least = [min(step["peak_bytes"] for step in run["steps"]) for run in (few, many)]
    assert abs(least[0] - least[1]) < ROUNDING
    starts = [[call for call in run["start"] if OBJECTS not in call[0]] for run in (few, many)]
    assert starts[0] == starts[1] != []
