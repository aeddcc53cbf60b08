"""Dataset Decomposition as the trainer reads it: from short pieces to long ones, cycle by cycle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config import Config, DataConfig, TrainingConfig, WindowConfig
from megatron_ext.data.packing import build_plan, plan_folder, plan_key, save_plan
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.errors import UserError
from megatron_ext.run.rows import open_rows
from tests.theirs import write_theirs

LENGTH, SHORTEST, CYCLES = 2048, 256, 8  # the defaults


def test_rows_follow_the_curriculum(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(100), np.log(8000), size=2000)).astype(int)
    write_theirs(prefix, (np.full(length, number % 100) for number, length in enumerate(lengths)), 100)
    data = DataConfig(data_path=(str(prefix),), seq_length=LENGTH, packing="decomposition", split="1,0,0")
    config = Config(data=data, window=WindowConfig(document_mask=True))
    with pytest.raises(UserError, match="has no decomposition plan for seq_length 2048"):
        open_rows(config, 100)
    source = IndexedSource(prefix)
    arguments = ("decomposition", source, range(2000), LENGTH, config.training.seed)
    plan = build_plan(*arguments)
    save_plan(plan, plan_folder(prefix, plan_key(*arguments)))
    train = open_rows(config, 100).train
    sizes = []
    for sample in range(plan.rows):
        ends = [0, *train(sample).document_ends.tolist(), LENGTH]
        (size,) = {later - earlier for earlier, later in itertools.pairwise(ends) if later > earlier}
        sizes.append(size)
    assert set(sizes) == {256, 512, 1024, 2048}
    cycles = np.array_split(np.log2(sizes), CYCLES)
    for cycle in cycles:
        begin, end = np.array_split(cycle, 2)
        assert end.mean() > begin.mean() + 0.2
    again = [train(plan.rows + sample).tokens.tolist() for sample in range(3)]
    assert again == [train(sample).tokens.tolist() for sample in range(3)]


def test_validation_rows_do_not_depend_on_packing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
            save_plan(build_plan(*arguments), plan_folder(prefix, plan_key(*arguments)))
        with caplog.at_level("INFO"):
            rows = open_rows(config, 100)
        assert rows.valid is not None
        found = [rows.valid(sample).tokens.tolist() for sample in range(9)]
        if packing == "random":
            wanted = found
    assert found == wanted
    assert "the run reads 0." in caplog.text
    with pytest.raises(UserError, match="has no decomposition plan"):
        open_rows(replace(config, training=replace(training, eval_packing="same")), 100)
