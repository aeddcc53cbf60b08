"""Dataset Decomposition as the trainer reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config import Config, DataConfig, TrainingConfig, WindowConfig
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.packing import build_plan, save_plan
from megatron_ext.errors import UserError
from megatron_ext.run.inputs import open_rows
from tests.theirs import write_theirs

LENGTH = 2048


def test_validation_rows_do_not_depend_on_packing(tmp_path: Path) -> None:
    """So that losses can be compared, unless --eval-packing same."""
    prefix = tmp_path / "data"
    write_theirs(prefix, (np.full(length, length % 100) for length in range(300, 900)), 100)
    source = IndexedSource(prefix)
    training = TrainingConfig(eval_interval=1, train_iters=1)
    for packing in ("random", "decomposition"):
        data = DataConfig(data_path=(str(prefix),), seq_length=LENGTH, packing=packing, split="1,1,0")
        config = Config(data=data, training=training, window=WindowConfig(document_mask=True))
        if packing == "decomposition":
            arguments = (packing, source, range(300), LENGTH, config.training.seed)
            save_plan(build_plan(*arguments), prefix)
        rows = open_rows(config, 100)
        found = [rows.valid(sample).tokens.tolist() for sample in range(9)]
        if packing == "random":
            wanted = found
    assert found == wanted
    with pytest.raises(UserError, match="has no decomposition plan"):
        open_rows(replace(config, training=replace(training, eval_packing="same")), 100)
