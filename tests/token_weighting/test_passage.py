"""The passage that a run leaves is the one that a report reads."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.inspect.passage import read_passage
from megatron_ext.token_weighting.passage import Passage, spelled


def test_what_is_written_is_read(tmp_path: Path) -> None:
    passage = Passage(step=3, start=2, tokens=(104, 105), texts=("h", "i"), weights=(0.0, 1.5), scores=(None, 0.25))
    passage.write(tmp_path)
    assert read_passage(tmp_path) == passage
    assert json.loads((tmp_path / "passage.json").read_text())["scores"] == [None, 0.25]
    assert [path.name for path in tmp_path.iterdir()] == ["passage.json"]


def test_a_character_is_spelled_by_its_last_token() -> None:
    """Tokens of the byte tokenizer are the text's UTF-8 bytes."""
    assert spelled(tuple("aé!".encode()), Tokenizer("bytes")) == ("a", "", "é", "!")
