"""A run's vocabulary, that its data sets were made with its tokenizer, and which score stores are of its rows."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.config import Config, DataConfig, ModelConfig, TrainingConfig, WeightingConfig, WindowConfig
from megatron_ext.data.preprocess.pipeline import PreprocessOptions, preprocess
from megatron_ext.data.text.tokenizer import train_bpe
from megatron_ext.errors import UserError
from megatron_ext.run.identity import checked_vocab_size, open_scores, row_identity
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from tests.theirs import write_theirs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`ours`, made with bytes; `theirs`, by Megatron; `bpe`, another tokenizer."""
    (tmp_path / "a.txt").write_text("some text")
    preprocess(PreprocessOptions([str(tmp_path / "a.txt")], str(tmp_path / "ours"), "bytes"))
    write_theirs(tmp_path / "theirs", [], 300)
    train_bpe(["some text, another text"], 260, tmp_path / "bpe")
    return tmp_path


def config(tokenizer: str | None, *data_path: object, vocab_size: int | None = None) -> Config:
    data = DataConfig(data_path=tuple(map(str, data_path)), tokenizer_model=tokenizer)
    return Config(data=data, model=ModelConfig(vocab_size=vocab_size))


def test_each_data_set_must_be_of_the_tokenizer(folder: Path) -> None:
    assert checked_vocab_size(config("bytes", folder / "ours")) == 257
    assert checked_vocab_size(config("bytes", 0.5, folder / "theirs", 0.5, folder / "ours")) == 257
    assert checked_vocab_size(config(str(folder / "bpe"), folder / "theirs")) == 260
    for data_path in ([folder / "ours"], [0.5, folder / "theirs", 0.5, folder / "ours"]):
        with pytest.raises(UserError, match=r"ours was made with another tokenizer \(bytes, fingerprint \w{12}\) than"):
            checked_vocab_size(config(str(folder / "bpe"), *data_path))


def test_the_number_of_token_ids(folder: Path) -> None:
    assert checked_vocab_size(config(None, folder / "ours", vocab_size=300)) == 300
    assert checked_vocab_size(config("bytes", folder / "ours", vocab_size=257)) == 257
    less = config("bytes", folder / "ours", vocab_size=256)
    assert checked_vocab_size(less) == 256  # ids are checked as they are read
    with pytest.raises(UserError, match="vocab_size: got nothing"):
        checked_vocab_size(config(None, folder / "ours"))


def weighted(folder: Path, first: object, second: object, split: str = "98,2,0", **packing: Any) -> Config:
    """A run of two rows of a frozen scorer, over the data sets `ours` and `theirs`."""
    words = (str(first), str(folder / "ours"), str(second), str(folder / "theirs"))
    return Config(
        data=DataConfig(data_path=words, split=split, seq_length=8, global_batch_size=1, **packing),
        model=ModelConfig(vocab_size=300),
        training=TrainingConfig(train_iters=2),
        window=WindowConfig(window_start=8, window_schedule="constant"),
        weighting=WeightingConfig(token_weighting="frozen", score_store=str(folder / "store")),
    )


def store(config: Config) -> None:
    """Score the run's rows."""
    identity: Any = row_identity(config, 300)
    store_identity = StoreIdentity(rows=2, short_context=4, short_stride=2, model="drawn", **identity)
    score_store = ScoreStore.create_or_resume(str(config.weighting.score_store), store_identity)
    for row in range(2):
        score_store.write(row, np.ones(8, np.float32))


def test_data_count_by_content(folder: Path) -> None:
    """The same tokens under another name are the same rows; with one token changed they are not."""

    def data() -> object:
        return row_identity(config("bytes", folder / "copy"), 257)["data"]

    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(folder / f"ours{suffix}", folder / f"copy{suffix}")
    assert data() == row_identity(config("bytes", folder / "ours"), 257)["data"]
    tokens = np.fromfile(folder / "copy.bin", dtype=np.uint16)
    tokens[5] ^= 1
    tokens.tofile(folder / "copy.bin")
    assert data() != row_identity(config("bytes", folder / "ours"), 257)["data"]


def test_a_score_store_serves_every_spelling_of_its_rows(folder: Path) -> None:
    """Only ratios of weights and of splits matter, as for a run that resumes, and a default may be written."""
    packing: dict[str, Any] = {"packing": "whole_document"}
    plain = weighted(folder, 2, 2, **packing)
    store(plain)
    alike = {"packing_options": (f"below={2**62}",)} | packing
    for config in (weighted(folder, 1, 1, **packing), weighted(folder, 0.5, 0.5, "49,1,0", **alike)):
        assert open_scores(config, 300, config.samples) is not None
    other_configs = (
        weighted(folder, 1, 3, **packing),
        weighted(folder, 2, 2, "90,10,0", **packing),
        weighted(folder, 2, 2, packing="whole_document", packing_options=("rows_per_document=1",)),
        weighted(folder, 2, 2),
        replace(plain, window=replace(plain.window, document_mask=True)),
    )
    for config in other_configs:
        with pytest.raises(UserError, match=r"store: its packing is 0.5 x whole_document .*, but this run needs "):
            open_scores(config, 300, config.samples)
