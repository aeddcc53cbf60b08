"""Inputs of a run: bad weights are refused, a mixture's rows are counted, validation rows do not depend on packing."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import CheckpointConfig, Config, DataConfig, TrainingConfig, WindowConfig
from megatron_ext.config.mixture import MixturePart
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.packing.plan import save_plan
from megatron_ext.data.packing.policies import build_plan
from megatron_ext.errors import UserError
from megatron_ext.run.inputs import VALIDATION, first_weights, open_rows, validation_setting
from tests.checkpoint.models import write_model
from tests.theirs import write_theirs

LENGTH = 16


def test_a_missing_optimizer_state_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama", vocab_size=64)
    config = Config(model=Pretrained.find(folder).model)
    init = CheckpointConfig(init_from=str(folder), init_optimizer=True)
    with pytest.raises(UserError, match="is a Hugging Face folder, which has no optimizer state"):
        first_weights(replace(config, checkpoint=init), 64)


def write_data(prefix: Path, token: int, length: int) -> str:
    write_theirs(prefix, (np.full(length, token) for _ in range(40)), 10)
    return str(prefix)


def test_rows_are_counted_by_dataset(tmp_path: Path) -> None:
    parts = [write_data(tmp_path / folder / "x", token, 20) for token, folder in enumerate("ab", start=1)]
    mixed = open_rows(Config(data=DataConfig(data_path=("7", parts[0], "3", parts[1]), seq_length=LENGTH)), 10)
    assert mixed.labels == ["x (1)", "x (2)"]
    assert mixed.shares == pytest.approx((0.7, 0.3))
    for samples in (range(8), range(5, 33), range(1000, 1001)):
        counted = Counter(int(mixed.row(sample).tokens[0]) for sample in samples)
        assert mixed.rows_of(samples) == {"x (1)": counted[1], "x (2)": counted[2]}


def test_padded_rows_count_without_their_padding(tmp_path: Path) -> None:
    """Rows of one document of 12 tokens among rows of 16: drawn as often as their share of the tokens needs."""
    full, padded = write_data(tmp_path / "full", 1, 20), write_data(tmp_path / "padded", 2, 12)
    mixture = (MixturePart(full, 0.5), MixturePart(padded, 0.5, packing="best_fit"))
    config = Config(data=DataConfig(mixture=mixture, seq_length=LENGTH, split="1,0,0"))
    save_plan(build_plan("best_fit", IndexedSource(padded), range(40), LENGTH, config.training.seed + 1), padded)
    mixed = open_rows(config, 10)
    assert [dataset.row_tokens for dataset in mixed.datasets] == [16.0, 12.0]
    drawn = mixed.rows_of(range(700))
    assert drawn == {"full": 300, "padded": 400}


def test_what_changes_a_validation_is_another_setting(tmp_path: Path) -> None:
    """Other options keep the setting: how weights are written, how rows are shared, training itself."""
    first_prefix = write_data(tmp_path / "one", 1, 20)
    second_prefix = write_data(tmp_path / "other", 2, 20)
    data = DataConfig(data_path=("1", first_prefix, "1", second_prefix), seq_length=LENGTH)
    training = TrainingConfig(eval_interval=1)

    def setting(data: DataConfig, **options: object) -> str:
        return validation_setting(Config(data=data, training=replace(training, **options)), 10)

    first = setting(data)
    longer = replace(data, seq_length=2 * LENGTH)
    changed = [
        setting(data, seed=5),
        setting(data, eval_iters=2),
        setting(data, eval_lengths=(8,)),
        setting(data, eval_lengths=(8,), eval_stride=4),
        setting(data, eval_document_mask=True),
        setting(longer),
        setting(longer, eval_lengths=(LENGTH,)),
        setting(replace(data, global_batch_size=16)),
        setting(replace(data, split="90,10,0")),
        setting(replace(data, eod_mask_loss=True)),
        setting(replace(data, data_path=("1", first_prefix, "2", second_prefix))),
        setting(replace(data, valid_data_path=(second_prefix,))),
        setting(replace(data, packing="best_fit"), eval_packing="same"),
    ]
    assert len({first, *changed}) == len(changed) + 1
    assert setting(replace(data, data_path=("2", first_prefix, "2", second_prefix))) == first
    assert setting(replace(data, micro_batch_size=2, packing="best_fit"), train_iters=7, eval_interval=3) == first
    write_data(tmp_path / "other", 3, 20)
    assert setting(data) not in {first, *changed}


def test_validation_rows_do_not_depend_on_packing(tmp_path: Path) -> None:
    """Losses can be compared, unless --eval-packing is same."""
    prefix = tmp_path / "data"
    write_theirs(prefix, (np.full(length, length % 100) for length in range(300, 900)), 100)
    source = IndexedSource(prefix)
    training = TrainingConfig(eval_interval=1, train_iters=1)
    for packing in ("random", "decomposition"):
        data = DataConfig(data_path=(str(prefix),), seq_length=2048, packing=packing, split="1,1,0")
        config = Config(data=data, training=training, window=WindowConfig(document_mask=True))
        if packing == "decomposition":
            arguments = (packing, source, range(300), 2048, config.training.seed)
            save_plan(build_plan(*arguments), prefix)
        rows = open_rows(config, 100, VALIDATION)
        token_ids = [rows.row(sample).tokens.tolist() for sample in range(9)]
        if packing == "random":
            wanted = token_ids
    assert token_ids == wanted
    with pytest.raises(UserError, match="has no decomposition plan"):
        open_rows(replace(config, training=replace(training, eval_packing="same")), 100, VALIDATION)
