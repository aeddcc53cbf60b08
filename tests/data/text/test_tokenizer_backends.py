"""SentencePiece, tiktoken and bytes behind the one interface."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.text.tokenizer import Tokenizer, train_bpe
from megatron_ext.data.text.tokenizer_backends import TIKTOKEN_PATTERN
from megatron_ext.errors import UserError

TEXTS = [f"the value of number {i} is {i * i}, naïve 😀 </s>\n" for i in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """spm.model, toy.tiktoken."""
    path = tmp_path_factory.mktemp("kinds")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=400, byte_fallback=True, model_type="bpe",
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (path / "spm.model").write_bytes(model.getvalue())
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"val", b"value", b" value", b"\n\n"]
    (path / "toy.tiktoken").write_bytes(ranks(tokens))
    return path


def ranks(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_round_trips(folder: Path, text: str) -> None:
    for name in ("bytes", str(folder / "toy.tiktoken"), str(folder / "spm.model")):
        tokenizer = Tokenizer(name)
        ids = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        if not name.endswith(".model"):  # SentencePiece adds a space, and has its own idea of \0
            assert tokenizer.decode(ids) == text


def test_sentencepiece_is_sentencepiece(folder: Path, tmp_path: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    ours = Tokenizer(folder / "spm.model")
    assert ours.encode_batch(TEXTS) == theirs.encode(TEXTS)
    assert [ours.decode(ids) for ids in ours.encode_batch(TEXTS)] == TEXTS
    assert (ours.vocab_size, ours.eod_id) == (theirs.vocab_size(), theirs.eos_id())
    assert ours.eod_id not in ours.encode("a</s>b")
    (tmp_path / "tokenizer.model").write_bytes((folder / "spm.model").read_bytes())
    assert Tokenizer(tmp_path).fingerprint == ours.fingerprint
    with pytest.raises(UserError, match="'<no such piece>' is not in the vocabulary"):
        Tokenizer(folder / "spm.model", eod_token="<no such piece>")
    (tmp_path / "bad.model").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"bad\.model is not a SentencePiece model"):
        Tokenizer(tmp_path / "bad.model")


def test_a_tiktoken_file_is_that_encoding(folder: Path, tmp_path: Path) -> None:
    ours = Tokenizer(folder / "toy.tiktoken")
    table = {base64.b64decode(a): int(b) for a, b in map(str.split, (folder / "toy.tiktoken").read_text().splitlines())}
    theirs = tiktoken.Encoding("t", pat_str=TIKTOKEN_PATTERN, mergeable_ranks=table, special_tokens={})
    assert ours.encode_batch(TEXTS) == [theirs.encode_ordinary(text) for text in TEXTS]
    assert len(ours.encode("the value")) == 2
    assert (ours.vocab_size, ours.eod_id) == (264, 263)
    assert ours.decode([263]) == "<|endoftext|>"
    assert ours.eod_id not in ours.encode("<|endoftext|>")
    model = tmp_path / "tokenizer.model"  # Llama 3's name for such a file
    model.write_bytes((folder / "toy.tiktoken").read_bytes())
    for name in (tmp_path, f"tiktoken:{model}"):
        assert Tokenizer(name).fingerprint == ours.fingerprint
    beside = {"pattern": r"\S+|\s+", "special_tokens": {"<|end_of_text|>": 300}}
    (tmp_path / "tokenizer.model.json").write_text(json.dumps(beside))
    described = Tokenizer(tmp_path)
    assert (described.eod_id, described.vocab_size) == (300, 301)
    assert described.fingerprint != ours.fingerprint
    assert len(described.encode(" the")) > len(ours.encode(" the")) == 1


@pytest.mark.parametrize(
    ("name", "content", "beside", "text"),
    [
        ("a.tiktoken", b"nonsense", None, r"a\.tiktoken is not a tiktoken file"),
        ("a.tiktoken", b"", None, r"a\.tiktoken is not a tiktoken file"),
        ("a.tiktoken", ranks([b"a"]), '{"pattern": "("}', r"a\.tiktoken\.json is wrong \("),
        ("a.tiktoken", ranks([b"a"]), "[1]", r"a\.tiktoken\.json is wrong \("),
        ("o200k_base.tiktoken", ranks([b"a"]), None, r"does not hold the pattern of o200k_base; pass tiktoken:o200k_b"),
    ],
)
def test_bad_tiktoken_files(tmp_path: Path, name: str, content: bytes, beside: str | None, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    if beside:
        (tmp_path / f"{name}.json").write_text(beside)
    with pytest.raises(UserError, match=text) as caught:
        Tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)


PLUG_IN = """
def toy():
    return {"name": "toy", "pat_str": r"\\S+|\\s+", "mergeable_ranks": {bytes([i]): i for i in range(256)},
            "special_tokens": {"<|endoftext|>": 256}}
ENCODING_CONSTRUCTORS = {"toy": toy}
"""


def test_tiktoken_by_name(tmp_path: Path) -> None:
    """A plug-in's encoding, as tiktoken finds it."""
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "toy_plug_in.py").write_text(PLUG_IN)
    program = (
        "from megatron_ext.data.text.tokenizer import Tokenizer; t = Tokenizer('tiktoken:toy');"
        "assert t.encode('é') == list('é'.encode()) and (t.eod_id, t.vocab_size) == (256, 257)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})


def test_a_name_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'no-such-encoding' is no file and no encoding of tiktoken; .*cl100k_base"):
        Tokenizer("tiktoken:no-such-encoding")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for proxy in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(UserError, match=r"p50k_edit is not in its cache and cannot be fetched .*TIKTOKEN_CACHE_DIR"):
        Tokenizer("tiktoken:p50k_edit")


def test_bytes() -> None:
    tokenizer = Tokenizer("bytes")
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 10]
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.decode([97, 256])) == (257, 256, "a<|endoftext|>")
    assert Tokenizer("bytes", eod_token="\n").eod_id == 10
    with pytest.raises(UserError, match="'é' is not in the vocabulary of bytes"):
        Tokenizer("bytes", eod_token="é")


def test_fingerprints_differ(folder: Path, tmp_path: Path) -> None:
    train_bpe(TEXTS, 300, tmp_path)
    names = ["bytes", folder / "toy.tiktoken", folder / "spm.model", tmp_path]
    assert len({Tokenizer(name).fingerprint for name in names}) == 4
    assert all(len(Tokenizer(name).fingerprint) == 64 for name in names)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist; needs .* SentencePiece .* or bytes"):
        Tokenizer(tmp_path)
