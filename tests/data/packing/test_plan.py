"""Plans on disk: the same arrays back, mapped; another plan, or a damaged one, is refused."""

import os
from collections.abc import Callable
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
    folder = plan_folder(tmp_path / "deep" / "data", key)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert folder.parent == tmp_path / "deep" / "data.packing"


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


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"what"), lambda file: os.truncate(file, 150)])
def test_a_damaged_plan_is_refused(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    plan = build_plan("carry_over", ListedSource([9]), [0], 4, 0)
    save_plan(plan, tmp_path / "data")
    assert load_plan(tmp_path / "data", plan.key).pieces.tolist() == [[0, 0, 4], [0, 4, 4], [0, 8, 1]]
    damage(plan_folder(tmp_path / "data", plan.key) / "pieces.npy")
    with pytest.raises(UserError, match="is damaged"):
        load_plan(tmp_path / "data", plan.key)
