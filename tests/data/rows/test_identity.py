"""A run's vocabulary, and that its data sets were made with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config import Config, DataConfig, ModelConfig
from megatron_ext.data.build.preprocess import PreprocessOptions, preprocess
from megatron_ext.data.rows.identity import vocabulary
from megatron_ext.data.text.tokenizer import train_bpe
from megatron_ext.errors import UserError
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
    assert vocabulary(config("bytes", folder / "ours")) == 257
    assert vocabulary(config("bytes", 0.5, folder / "theirs", 0.5, folder / "ours")) == 257
    assert vocabulary(config(str(folder / "bpe"), folder / "theirs")) == 260
    for data_path in ([folder / "ours"], [0.5, folder / "theirs", 0.5, folder / "ours"]):
        with pytest.raises(UserError, match=r"ours was made with another tokenizer \(bytes, fingerprint \w{12}\) than"):
            vocabulary(config(str(folder / "bpe"), *data_path))


def test_the_number_of_token_ids(folder: Path) -> None:
    assert vocabulary(config(None, folder / "ours", vocab_size=300)) == 300
    assert vocabulary(config("bytes", folder / "ours", vocab_size=257)) == 257
    with pytest.raises(UserError, match="got 256, needs at least the 257 token ids of bytes"):
        vocabulary(config("bytes", folder / "ours", vocab_size=256))
    with pytest.raises(UserError, match="vocab_size: got nothing"):
        vocabulary(config(None, folder / "ours"))
