"""Texts cut before tokenizing: exactly the ids of the whole text, or not cut at all."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_ext.data.text import cutting
from megatron_ext.data.text.cutting import BOUNDARY, CHUNK, PATTERNS, ChunkEncoder, can_cut
from megatron_ext.data.text.tokenizer import Tokenizer

GPT2 = "GPT-2's, built in"
TEXTS = [
    "the quick brown fox doesn't jump",
    "def f(x):\n    return x  \n\n\tx",
    "éa b12 345 ok",
    "a\u0301 b\r\n c_d",
] * 9


def trained(pattern: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == GPT2)
    if pattern != GPT2:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<|endoftext|>"]}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, show_progress=False, **alphabet))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def known() -> list[tokenizers.Tokenizer]:
    return [trained(pattern) for pattern in (GPT2, *sorted(PATTERNS))]


WORDS = st.sampled_from(
    [*"ab é\u0301\u0308 \t\n\r.,'!_-(1 2Z😀中\u00a0\u017f", "'s", "'ll", " the", "fox", " a b", "  ", "\n\n"]
)


@given(text=st.one_of(st.lists(WORDS, max_size=40).map("".join), st.text()))
@settings(max_examples=400, deadline=None)
def test_chunks_have_the_ids_of_the_whole(known: list[tokenizers.Tokenizer], text: str) -> None:
    chunks = BOUNDARY.split(text)
    assert "".join(chunks) == text
    assert [chunk for chunk in CHUNK.findall(text) if chunk] == [chunk for chunk in chunks if chunk]
    for tokenizer in known:
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert [token for chunk in chunks for token in tokenizer.encode(chunk, add_special_tokens=False).ids] == whole


def test_memory_is_bounded(known: list[tokenizers.Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts keep their ids when what is remembered has to be forgotten, and long texts are taken in pieces."""
    monkeypatch.setattr(cutting, "MEMORY", 1000)
    longest = 0

    def encode(texts: list[str]) -> list[list[int]]:
        nonlocal longest
        longest = max(longest, sum(map(len, texts)))
        return [known[0].encode(text, add_special_tokens=False).ids for text in texts]

    text = " ".join(f"word{i % 97} of{i}" for i in range(20_000))
    encoder = ChunkEncoder(encode)
    for part in (text, "", text[:50]):
        assert encoder(part) == known[0].encode(part, add_special_tokens=False).ids
    assert len(text) > 250_000
    assert longest < 70_000


def test_common_tokenizers_use_chunks(known: list[tokenizers.Tokenizer], tmp_path: Path) -> None:
    for tokenizer in known:
        assert can_cut(json.loads(tokenizer.to_str()))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        text = "the quick fox\n doesn't jump. " * 1000
        assert Tokenizer(tmp_path).encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"normalizer":{"type":"NFC"}', '"normalizer":{"type":"Prepend","prepend":"_"}'),
        (r"\\p{N}", "[0-9]"),
        ('"add_prefix_space":false', '"add_prefix_space":true'),
        ('"type":"BPE"', '"type":"Unigram"'),
    ],
)
def test_other_tokenizers_do_not(known: list[tokenizers.Tokenizer], old: str, new: str) -> None:
    about = known[1].to_str()
    assert can_cut(json.loads(about))
    assert old in about
    assert not can_cut(json.loads(about.replace(old, new)))


def test_added_tokens_are_found(tmp_path: Path) -> None:
    tokenizer = trained(sorted(PATTERNS)[1])
    plain = [AddedToken("<tool_call>", normalized=False), AddedToken("quick fox", normalized=False, rstrip=True)]
    tokenizer.add_tokens(plain)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text in ("the quick fox  jumps", "a <tool_call> b", "the quick brown fox", ""):
        assert Tokenizer(tmp_path).encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert can_cut(json.loads(tokenizer.to_str()))
    tokenizer.add_tokens([AddedToken("Kelvin", normalized=True)])  # may come out of a Kelvin sign
    assert not can_cut(json.loads(tokenizer.to_str()))
