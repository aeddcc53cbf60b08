"""The metadata of a data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.data.build.preprocess import PreprocessOptions, preprocess
from megatron_ext.data.text.metadata import check_tokenizer, read_metadata
from megatron_ext.data.text.tokenizer import Tokenizer, train_bpe
from megatron_ext.errors import UserError


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    prefix = tmp_path / "data"
    preprocess(PreprocessOptions([str(tmp_path / "a.txt")], str(prefix), "bytes"))
    check_tokenizer(prefix, Tokenizer("bytes"))
    other = train_bpe(["some text"], 257, tmp_path / "other")
    with pytest.raises(
        UserError, match=r"data was made with another tokenizer \(bytes, fingerprint \w{12}\)"
    ) as caught:
        check_tokenizer(prefix, other)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", '{"tokens": '])
def test_damaged_metadata_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(UserError, match=r"data\.json is not the metadata of a dataset"):
        read_metadata(tmp_path / "data")
