"""Plans on disk: the same arrays back, mapped; another plan is not found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data.packing.plan import PackingPlan, load_plan, plan_folder, save_plan
from megatron_ext.data.packing.policies import build_plan, plan_key
from megatron_ext.errors import UserError
from tests.data.packing.sources import ListedSource

LENGTHS = [5, 17, 9, 0, 8]
ARGUMENTS = {"policy": "upsample_long", "row_length": 8, "seed": 3, "options": {"threshold": 8}}


@pytest.fixture
def plan() -> PackingPlan:
    return build_plan(source=ListedSource(LENGTHS), documents=range(5), **ARGUMENTS)


def test_a_saved_plan_is_memory_mapped(plan: PackingPlan, tmp_path: Path) -> None:
    key = plan_key(source=ListedSource(LENGTHS), documents=range(5), **ARGUMENTS)
    save_plan(plan, tmp_path / "deep" / "data")
    loaded = load_plan(tmp_path / "deep" / "data", key)
    assert loaded.key == plan.key == key
    np.testing.assert_array_equal(loaded.pieces, plan.pieces)
    np.testing.assert_array_equal(loaded.row_offsets, plan.row_offsets)
    assert isinstance(loaded.pieces, np.memmap)
    assert isinstance(loaded.row_offsets, np.memmap)
    assert list((tmp_path / "deep" / "data.packing").iterdir()) == [plan_folder(tmp_path / "deep" / "data", key)]


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "carry_over", "options": None},
        {"row_length": 16},
        {"seed": 4},
        {"options": {"threshold": 9, "factor": 5.0}},
        {"source": ListedSource([5, 17, 9, 1, 7])},
        {"documents": range(4)},
    ],
)
def test_a_plan_of_something_else_is_not_found(plan: PackingPlan, tmp_path: Path, change: dict[str, Any]) -> None:
    save_plan(plan, tmp_path / "data")
    other = plan_key(**{"source": ListedSource(LENGTHS), "documents": range(5), **ARGUMENTS, **change})
    with pytest.raises(UserError, match=rf"data has no {other.policy} plan for seq_length {other.row_length} and seed"):
        load_plan(tmp_path / "data", other)
