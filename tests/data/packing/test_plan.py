"""Plans on disk: the same arrays back, mapped; another plan, or a damaged one, is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from megatron_ext.data.packing import POLICIES, PackingPlan, build_plan, load_plan, plan_folder, plan_key, save_plan
from megatron_ext.data.packing.plan import Packing
from megatron_ext.errors import UserError
from tests.data.packing.sources import ListedSource

LENGTHS = [5, 17, 9, 0, 8]
ARGUMENTS = {"policy": "upsample_long", "row_length": 8, "seed": 3, "options": {"threshold": 8}}


@pytest.fixture
def plan() -> PackingPlan:
    return build_plan(source=ListedSource(LENGTHS), documents=range(5), **ARGUMENTS)


def test_a_saved_plan_is_memory_mapped(plan: PackingPlan, tmp_path: Path) -> None:
    key = plan_key(source=ListedSource(LENGTHS), documents=range(5), **ARGUMENTS)
    folder = plan_folder(tmp_path / "deep" / "data", key)
    save_plan(plan, folder)
    loaded = load_plan(folder, key)
    assert loaded.key == plan.key == key
    np.testing.assert_array_equal(loaded.pieces, plan.pieces)
    np.testing.assert_array_equal(loaded.row_offsets, plan.row_offsets)
    assert isinstance(loaded.pieces, np.memmap)
    assert isinstance(loaded.row_offsets, np.memmap)
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
def test_a_plan_of_something_else_is_refused(plan: PackingPlan, tmp_path: Path, change: dict[str, Any]) -> None:
    save_plan(plan, tmp_path / "plan")
    other = plan_key(**{"source": ListedSource(LENGTHS), "documents": range(5), **ARGUMENTS, **change})
    with pytest.raises(UserError, match=r"the plan .* is of other documents or options"):
        load_plan(tmp_path / "plan", other)
    assert plan_folder("data", other) != plan_folder("data", plan.key)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "plan.json").write_text("{"), "is no JSON object"),
        (lambda folder: (folder / "pieces.npy").write_bytes(b"what"), "is damaged"),
        (lambda folder: (folder / "row_offsets.npy").unlink(), "is damaged"),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path: Path, damage: Callable[[Path], object], text: str) -> None:
    plan = build_plan("carry_over", ListedSource([9]), [0], 4, 0)
    save_plan(plan, tmp_path / "plan")
    assert load_plan(tmp_path / "plan", plan.key).pieces.tolist() == [[0, 0, 4], [0, 4, 4], [0, 8, 1]]
    damage(tmp_path / "plan")
    with pytest.raises(UserError, match=text):
        load_plan(tmp_path / "plan", plan.key)


def test_a_configuration_names_every_policy() -> None:
    assert set(get_args(Packing)) == set(POLICIES)
