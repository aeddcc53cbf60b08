"""tools/convert_tokenizer.py: the ids of the original library, and special tokens that are never guessed."""

import base64
import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tiktoken

from megatron_ext.data.text.tokenizer import Tokenizer
from tools.convert_tokenizer import LLAMA3_PATTERN, main

LINES = [f"the value of number {i} is {i * i}, naïve 😀 < x/k > unx41s\n" for i in range(200)]
TOKENS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"aa", b"aaaa", b"    ", b"\n\n"]
SPECIAL = {"<|endoftext|>": 270, "<|fim_prefix|>": 271}


def ranks(path: Path, tokens: list[bytes] = TOKENS) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)))
    return path


def convert(file: Path, output: Path, *more: str) -> Tokenizer:
    assert main(["--input", str(file), "--output", str(output), *more]) == 0
    return Tokenizer(output)


def test_llama3s_documents_do_not_end_with_their_beginning(tmp_path: Path) -> None:
    tokenizer = convert(ranks(tmp_path / "tokenizer.model"), tmp_path / "out", "--encoding", "llama3")
    first = len(TOKENS)
    assert (tokenizer.bos_id, tokenizer.eod_id, tokenizer.vocab_size) == (first, first + 1, first + 256)
    assert tokenizer.decode([first, first + 1, first + 9]) == "<|begin_of_text|><|end_of_text|><|eot_id|>"
    named = convert(tmp_path / "tokenizer.model", tmp_path / "newer", "--encoding", "llama3.1")
    assert named.decode([first + 9, first + 10]) == "<|eot_id|><|python_tag|>"


def test_special_tokens_are_those_of_the_file_beside(tmp_path: Path) -> None:
    file = ranks(tmp_path / "a.tiktoken")
    (tmp_path / "a.tiktoken.json").write_text(json.dumps({"pattern": r"\S+|\s+", "special_tokens": SPECIAL}))
    tokenizer = convert(file, tmp_path / "out")
    theirs = tiktoken.Encoding(
        "a", pat_str=r"\S+|\s+", mergeable_ranks={token: i for i, token in enumerate(TOKENS)}, special_tokens=SPECIAL
    )
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (270, theirs.n_vocab)
    for text in (*LINES, "<|endoftext|> the<|fim_prefix|>"):
        assert tokenizer.encode(text) == theirs.encode_ordinary(text)


@pytest.mark.parametrize("run", [" ", "a", "\n", "é", " the"])
def test_long_runs(tmp_path: Path, run: str) -> None:
    """Two million spaces make tiktoken itself panic."""
    tokenizer = convert(ranks(tmp_path / "tokenizer.model"), tmp_path / "out", "--encoding", "llama3")
    theirs = tiktoken.Encoding(
        "a", pat_str=LLAMA3_PATTERN, mergeable_ranks={token: i for i, token in enumerate(TOKENS)}, special_tokens={}
    )
    assert tokenizer.encode(run * 10_000) == theirs.encode_ordinary(run * 10_000)
    assert tokenizer.decode(tokenizer.encode(run * 500_000)) == run * 500_000


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("normalized", [True, False])
def test_sentencepiece(tmp_path: Path, kind: str, normalized: bool) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=400, byte_fallback=True, model_type=kind,
        normalization_rule_name="nmt_nfkc" if normalized else "identity", remove_extra_whitespaces=normalized,
        hard_vocab_limit=False, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "spm.model").write_bytes(model.getvalue())
    ours = convert(tmp_path / "spm.model", tmp_path / "out")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    texts = [*LINES, "  two  spaces ", "a</s>b<s>", "\t漢字ｱ\n"]
    assert list(map(ours.encode, texts)) == theirs.encode(texts)
    assert (ours.vocab_size, ours.eod_id, ours.bos_id) == (theirs.vocab_size(), theirs.eos_id(), theirs.bos_id())


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        (None, "does not say its special tokens; give --encoding"),
        ('{"special_tokens": {}}', "needs {"),
        ('{"pattern": "(", "special_tokens": {}}', "is wrong"),
        ('{"pattern": "x", "special_tokens": {"<s>": 3}}', "special tokens with ids below"),
        ("[1]", "is no object"),
    ],
)
def test_refusals(tmp_path: Path, capfd: pytest.CaptureFixture[str], beside: str | None, text: str) -> None:
    file = ranks(tmp_path / "a.tiktoken")
    if beside:
        (tmp_path / "a.tiktoken.json").write_text(beside)
    assert main(["--input", str(file), "--output", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err
    assert text in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out" / "tokenizer.json").exists()
