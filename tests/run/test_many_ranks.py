"""What a step costs a rank does not depend on how many ranks there are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import SmallData
from tests.runs import CONFIG
from tests.theirs import write_theirs

ROOT = Path(__file__).resolve().parents[2]
ROW_LENGTH = 128
STEPS = 10
ROUNDING = 2**14  # bytes
OBJECTS = "allgather"  # Megatron-Core's optimizer gathers the parameter groups of all ranks at the start


def costs(data: SmallData, world_size: int, folder: Path) -> dict[str, Any]:
    """What `many_ranks` prints, with a row for each data-parallel rank.

    The data has more rows than the steps need: at the end of an epoch a step also draws the order of the next one.
    """
    prefix = folder / str(world_size)
    document = np.arange(world_size * STEPS * ROW_LENGTH // 40) % 512
    write_theirs(prefix, [document] * 50, 1024)
    sizes = ["--seq-length", ROW_LENGTH, "--window-start", 16, "--window-rate", 100, "--train-iters", STEPS]
    rows = ["--micro-batch-size", 1, "--global-batch-size", world_size, "--data-path", prefix]
    words = [*CONFIG, *data.flags, *sizes, *rows]
    command = [sys.executable, "-m", "tests.run.many_ranks", str(world_size), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1024, 16384])
def test_a_step_costs_as_much_among_many_ranks(small_data: SmallData, world_size: int, tmp_path: Path) -> None:
    few_ranks = costs(small_data, 64, tmp_path)
    many_ranks = costs(small_data, world_size, tmp_path)
    for few_step, many_step in zip(few_ranks["steps"], many_ranks["steps"], strict=True):
        assert many_step["collectives"] == few_step["collectives"] != []
    least = [min(step["peak_bytes"] for step in run["steps"]) for run in (few_ranks, many_ranks)]
    assert abs(least[0] - least[1]) < ROUNDING, least
    starts = [[call for call in run["start"] if OBJECTS not in call[0]] for run in (few_ranks, many_ranks)]
    assert starts[0] == starts[1] != []
