"""Incremental decoding."""

from __future__ import annotations

import pytest

from megatron_ext.data.text.tokenizer import TextStream, Tokenizer, train_bpe

TEXT = "Once upon a time 😀 naïve café — 漢字\n\n  spaces   end"


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "bytes":
        return Tokenizer("bytes")
    return train_bpe([TEXT] * 3, 300, tmp_path_factory.mktemp("bpe"))


def test_the_pieces_are_the_text_in_complete_characters(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    stream = TextStream(tokenizer.decode)
    pieces = [stream.put(token) for token in tokens]
    assert "".join(pieces) + stream.end() == tokenizer.decode(tokens)
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(TEXT) / 4  # it comes in many pieces, not at the end


def test_an_incomplete_character_at_the_end_is_returned() -> None:
    tokenizer = Tokenizer("bytes")
    stream = TextStream(tokenizer.decode)
    cut = tokenizer.encode("é")[:1]
    assert [stream.put(token) for token in cut] == [""]
    assert stream.end() == "\ufffd"
