"""What an asynchronous checkpoint holds: the tensors as they were when it was begun."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from megatron_ext.engine.writer import HashingWriter, Staging


@pytest.mark.parametrize(("staged", "written"), [(True, [1.0, 2.0]), (False, [3.0, 4.0])])
def test_a_step_between_staging_and_writing(tmp_path: Path, staged: bool, written: list[float]) -> None:
    """The copy is of before the step; without one, a writer takes the tensors as they are."""
    weight = torch.tensor([1.0, 2.0])
    writer = HashingWriter(tmp_path, Staging() if staged else None)
    plan = SavePlan(_create_write_items("weight", weight), storage_data=SimpleNamespace(prefix="__0_"))
    planner: Any = SimpleNamespace(resolve_data=lambda item: weight)
    writer.prepare_write_data(plan, planner)
    weight += 2
    writer.write()
    assert torch.load(tmp_path / "__0_0.distcp", weights_only=True).tolist() == written


def test_memory_is_used_again_by_the_next_checkpoint() -> None:
    """And not by another tensor of the same one."""
    staging, tensor = Staging(), torch.ones(3)
    first, other = staging.copy("a", tensor), staging.copy("b", tensor)
    assert staging.copy("a", 2 * tensor) is first
    assert (first.tolist(), other.tolist()) == ([2.0] * 3, [1.0] * 3)
    assert staging.copy("a", torch.ones(4)).shape == (4,)
