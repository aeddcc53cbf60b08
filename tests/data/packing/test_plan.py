"""Plans on disk: the same arrays back, mapped; another plan is not found."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.data.packing.plan import load_plan, plan_folder, save_plan
from megatron_ext.data.packing.policies import build_plan, plan_key
from tests.conftest import refused
from tests.data.packing.sources import ListedSource


def test_a_plan_is_found_by_its_key(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"policy": "upsample_long", "row_length": 8, "seed": 3, "options": {"threshold": 8}}
    arguments |= {"source": ListedSource([5, 17, 9, 0, 8]), "documents": range(5)}
    plan, key = build_plan(**arguments), plan_key(**arguments)
    save_plan(plan, tmp_path / "deep" / "data")
    loaded = load_plan(tmp_path / "deep" / "data", key)
    assert loaded.key == plan.key == key
    for loaded_array, saved_array in ((loaded.pieces, plan.pieces), (loaded.row_offsets, plan.row_offsets)):
        np.testing.assert_array_equal(loaded_array, saved_array)
        assert isinstance(loaded_array, np.memmap)
    assert list((tmp_path / "deep" / "data.packing").iterdir()) == [plan_folder(tmp_path / "deep" / "data", key)]
    for change in (
        {"policy": "carry_over", "options": None},
        {"row_length": 16},
        {"seed": 4},
        {"options": {"threshold": 9, "factor": 5.0}},
        {"source": ListedSource([5, 17, 9, 1, 7])},
        {"documents": range(4)},
    ):
        other_key = plan_key(**arguments | change)
        message = f"has no {other_key.policy} plan for seq_length {other_key.row_length} and seed"
        assert message in refused(load_plan, tmp_path / "deep" / "data", other_key)
