"""tools/convert_tokenizer.py: the ids of the original library, and special tokens that are never guessed."""

import base64
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from megatron_ext.data.text.tokenizer import Tokenizer
from megatron_ext.errors import installed_version
from tests.conftest import refused
from tools.convert_tokenizer import LLAMA3_PATTERN, main

LINES = [f"the value of number {i} is {i * i}, naïve 😀 < x/k > unx41s\n" for i in range(200)]
TOKENS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"aa", b"aaaa", b"    ", b"\n\n"]
RANKS = {token: rank for rank, token in enumerate(TOKENS)}
Edit = Callable[[Any], None] | None
SPECIAL = {"<|endoftext|>": 270, "<|fim_prefix|>": 271}


def ranks(path: Path) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in RANKS.items()))
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
    # as in transformers' convert_llama_weights_to_hf.py
    reserved = {3: 1, 5: 2, 11: 3, 255: 247}
    for place, number in reserved.items():
        assert named.decode([first + place]) == f"<|reserved_special_token_{number}|>"


def test_special_tokens_are_those_of_the_file_beside(tmp_path: Path) -> None:
    file = ranks(tmp_path / "a.tiktoken")
    (tmp_path / "a.tiktoken.json").write_text(json.dumps({"pattern": r"\S+|\s+", "special_tokens": SPECIAL}))
    tokenizer = convert(file, tmp_path / "out")
    encoding = tiktoken.Encoding("a", pat_str=r"\S+|\s+", mergeable_ranks=RANKS, special_tokens=SPECIAL)
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (270, encoding.n_vocab)
    for text in (*LINES, "<|endoftext|> the<|fim_prefix|>"):
        assert tokenizer.encode(text) == encoding.encode_ordinary(text)


def test_long_runs(tmp_path: Path) -> None:
    """Two million spaces make tiktoken itself panic."""
    tokenizer = convert(ranks(tmp_path / "tokenizer.model"), tmp_path / "out", "--encoding", "llama3")
    encoding = tiktoken.Encoding("a", pat_str=LLAMA3_PATTERN, mergeable_ranks=RANKS, special_tokens={})
    for run in (" ", "a", "\n", "é", " the"):
        assert tokenizer.encode(run * 10_000) == encoding.encode_ordinary(run * 10_000)
        assert tokenizer.decode(tokenizer.encode(run * 500_000)) == run * 500_000


def train(file: Path, edit: Edit = None, lines: list[str] = LINES, **settings: Any) -> SentencePieceProcessor:
    """Train a SentencePiece model on lines, edit it and write it to a file."""
    written = io.BytesIO()
    options = {"vocab_size": 400, "byte_fallback": True, "hard_vocab_limit": False, "character_coverage": 1.0}
    options |= {"minloglevel": 2, "num_threads": 1, **settings}
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **options)
    proto = ModelProto.FromString(written.getvalue())
    if edit is not None:
        edit(proto)
    file.write_bytes(proto.SerializeToString())
    return SentencePieceProcessor(model_proto=proto.SerializeToString())


def normal_pieces(proto: Any) -> list[Any]:
    return [piece for piece in proto.pieces if piece.type == piece.NORMAL]


def shuffle(proto: Any) -> None:
    """Give the pieces another order of ids than of scores."""
    pieces = [(piece.piece, piece.score) for piece in normal_pieces(proto)]
    random.Random(0).shuffle(pieces)
    for number, piece in enumerate(normal_pieces(proto)):
        piece.piece, piece.score = pieces[number]


def mislead(proto: Any) -> None:
    """The trainer's settings name another unknown piece than the types of the pieces."""
    proto.trainer_spec.unk_id = 0
    proto.trainer_spec.unk_piece = "<s>"


def level(proto: Any) -> None:
    """All segmentations have the same score, apart from rounding."""
    for piece in normal_pieces(proto):
        piece.score = -1.37 * len(piece.piece)


def drop_short(proto: Any) -> None:
    """Pieces that others are merged from are not used themselves."""
    for piece in normal_pieces(proto):
        piece.type = piece.UNUSED if len(piece.piece) == 2 else piece.NORMAL


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
NO_PREFIX = {**PLAIN, "add_dummy_prefix": False}
SYMBOLS = {"user_defined_symbols": ["<mask>", "mask", "<sep>"], "control_symbols": ["<cls>", "☃<cls>", "<mask"]}
OTHER_IDS = {"unk_id": 3, "bos_id": 0, "eos_id": 1, "pad_id": 2}
LATIN_ONLY = {"byte_fallback": False, "character_coverage": 0.98}
ODD = [
    *(*LINES, "", " ", "   a", "  two  spaces ", "\n", "\n\n \t", "a\r\nb\n\n\nc", " \u2581 ", "a\u2581\u2581"),
    *("a" * 50, "<" * 9, "é" * 33, "a</s>b<s>", "</s>", "<s> a</s>", "<unk>", "<0x41>", "x<0x0A>", "<cls>x", "漢<漢"),
    *("<mask>", " <mask> ", "a<mask>b", "a <mask>  b<mask><mask>", "<mask></s><mask>", "<mask><0x41><mask>  <s>"),
    *("<mask", "\uff1cmask\uff1e", "a<sep> x", "maskers mask", "x<sep>y  <sep>\n", "<mask>☃<cls><mask>the"),
    *("\x00\x01", "\ufeffa", "\xad\u200b\u200d x", "\xa0\u3000x\u2028", "\t漢字\uff71\n", "naïve 😀👩\u200d👧 🇩🇪"),
    *("שלום عليكم", "हिन्दी क्षत्रिय", "ไทยภาษา", "한국어 \u1112\u1161\u11ab", "\xa8x \xa8", "\uff41\u0301 \uff76\uff9e"),
    *("e\u0301 e\u0302\u0301 \u0928\u093c x\u0304", "\xbd\u0301 \ufdfa \u2103"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    ("edit", "settings"),
    [
        (None, {}),
        (None, PLAIN),
        (shuffle, NO_PREFIX),
        (shuffle, SYMBOLS),
        (None, PLAIN | SYMBOLS | LATIN_ONLY),
        (None, NO_PREFIX | {"user_defined_symbols": ["\n", "\n\n", "▁▁", "<mask>"]}),
        (mislead, OTHER_IDS | LATIN_ONLY),
    ],
)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, kind: str, edit: Edit, settings: dict[str, Any]) -> None:
    processor = train(tmp_path / "spm.model", edit, model_type=kind, **settings)
    tokenizer = convert(tmp_path / "spm.model", tmp_path / "out")
    assert {text: tokenizer.encode(text) for text in ODD} == {text: processor.encode(text) for text in ODD}
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id) == (
        processor.vocab_size(),
        processor.eos_id(),
        processor.bos_id(),
    )
    for text in LINES[:3]:
        assert tokenizer.decode(tokenizer.encode(text[:-1])) == processor.decode(processor.encode(text[:-1]))


def test_ties_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    processor = train(tmp_path / "spm.model", level, model_type="unigram")
    tokenizer = convert(tmp_path / "spm.model", tmp_path / "out")
    (ties,) = re.findall(r"(\d+) others of the same score", capfd.readouterr().out)
    assert int(ties) > 0
    for text in LINES[:20]:
        pieces = ["".join(processor.id_to_piece(ids)) for ids in (tokenizer.encode(text), processor.encode(text))]
        assert pieces[0] == pieces[1]


@pytest.mark.parametrize(
    ("edit", "settings"),
    [
        (None, {"model_type": "word"}),
        (drop_short, {"model_type": "bpe"}),  # SentencePiece divides it again
        (level, {"model_type": "bpe"}),  # equal scores decide which pairs are merged
        (None, {"model_type": "unigram", "treat_whitespace_as_suffix": True}),
        (None, {"model_type": "unigram", "user_defined_symbols": ["\n"]}),  # which the normalizer leaves alone
    ],
)
def test_other_ids_are_refused(tmp_path: Path, capfd: Any, edit: Edit, settings: dict[str, Any]) -> None:
    train(tmp_path / "spm.model", edit, **settings)
    assert main(["--input", str(tmp_path / "spm.model"), "--output", str(tmp_path / "out")]) == 2
    assert re.fullmatch("error: input: the converted tokenizer gives other ids of .*\n", capfd.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_many_characters(tmp_path: Path) -> None:
    """Real Japanese models have more characters that are not neighbours in Unicode than a pattern may hold."""
    characters = [chr(number) for number in (*range(0x4E00, 0x9FFF, 2), *range(0xAC00, 0xD7A3, 2))]
    rows = ["".join(characters[start : start + 64]) for start in range(0, len(characters), 64)]
    processor = train(tmp_path / "spm.model", lines=rows, model_type="unigram", vocab_size=16_500)
    tokenizer = convert(tmp_path / "spm.model", tmp_path / "out")
    for text in (*rows[:9], "<0x41>", "x<0x41> <unk>", "丁<丁"):
        assert tokenizer.encode(text) == processor.encode(text)


def break_map(proto: Any) -> None:
    """The character map lacks what it maps to, which SentencePiece accepts and which makes tokenizers panic."""
    whole = proto.normalizer_spec.precompiled_charsmap
    proto.normalizer_spec.precompiled_charsmap = whole[: 4 + int.from_bytes(whole[:4], "little")] + bytes(1)


def test_what_cannot_be_converted_leaves_the_output_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "good.model", model_type="unigram")
    train(tmp_path / "other.model", model_type="word")
    (tmp_path / "empty.model").touch()
    (tmp_path / "torn.model").write_bytes((tmp_path / "good.model").read_bytes()[:5000])
    proto = ModelProto.FromString((tmp_path / "good.model").read_bytes())
    break_map(proto)
    (tmp_path / "map.model").write_bytes(proto.SerializeToString())
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    (tmp_path / "a.tiktoken").write_bytes(b"".join(ranks(tmp_path / "all").read_bytes().splitlines(True)[:128]))
    (tmp_path / "a.tiktoken.json").write_text('{"pattern": ".", "special_tokens": {}}')  # tiktoken panics at byte 128
    names = ("other.model", "empty.model", "torn.model", "map.model", "tekken.json", "a.tiktoken")
    for output in ("new", "old"):
        if output == "old":
            before = convert(tmp_path / "good.model", tmp_path / "old").fingerprint
        for name in names:
            command = ["--input", str(tmp_path / name), "--output", str(tmp_path / output), "--overwrite"]
            assert main(command) == 2
            assert capfd.readouterr().err.splitlines()[-1].startswith("error: input: ")
    assert not (tmp_path / "new").exists()
    assert Tokenizer(tmp_path / "old").fingerprint == before


def test_ids_are_those_of_tekken(tmp_path: Path) -> None:
    """Special tokens have the first ids, also those without a name; tokens beyond the vocabulary's size are unused."""
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in RANKS.items()]
    names = ["<unk>", "<s>", "</s>", "[INST]"]
    about = {
        "config": {"pattern": r"\S+|\s+", "default_num_special_tokens": 9, "default_vocab_size": 9 + len(RANKS) - 1},
        "special_tokens": [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)],
        "vocab": vocab,
    }
    (tmp_path / "tekken.json").write_text(json.dumps(about))
    tokenizer = convert(tmp_path / "tekken.json", tmp_path / "out")
    used = {token: rank for token, rank in RANKS.items() if rank < len(RANKS) - 1}
    encoding = tiktoken.Encoding("a", pat_str=r"\S+|\s+", mergeable_ranks=used, special_tokens={})
    for text in (*LINES, "</s>", "<s>[INST]the", "\n\n"):
        assert tokenizer.encode(text) == [9 + rank for rank in encoding.encode_ordinary(text)]
    assert (tokenizer.eod_id, tokenizer.bos_id, tokenizer.vocab_size) == (2, 1, 9 + len(used))
    assert tokenizer.decode(range(9)) == "".join(names) + "".join(f"<SPECIAL_{number}>" for number in range(4, 9))
    assert "convert_tokenizer.py" in refused(Tokenizer, tmp_path / "tekken.json")
    del about["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(about))
    command = ["--input", str(tmp_path / "tekken.json"), "--output", str(tmp_path / "other")]
    assert main(command) == (2 if installed_version("mistral-common") is None else 0)


def test_special_tokens_that_cannot_be_read_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = ranks(tmp_path / "a.tiktoken")
    for beside, text in (
        (None, "does not say its special tokens; give --encoding"),
        ('{"special_tokens": {}}', "needs {"),
        ('{"pattern": "(", "special_tokens": {}}', "is wrong"),
        ('{"pattern": "", "special_tokens": {}}', "matches the empty text"),
        ('{"pattern": "x", "special_tokens": {"<s>": 3}}', "special tokens with ids below"),
        ('{"pattern": "x", "special_tokens": {"<s>": 1e9}}', "or with no number"),
        ("[1]", "is no object"),
    ):
        if beside:
            (tmp_path / "a.tiktoken.json").write_text(beside)
        assert main(["--input", str(file), "--output", str(tmp_path / "out")]) == 2
        assert text in capfd.readouterr().err
    assert not (tmp_path / "out" / "tokenizer.json").exists()
