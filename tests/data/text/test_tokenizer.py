"""Tokenizers: exact round trips, end tokens, and training that repeats itself."""

import io
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_ext.data.text.chat import ChatTemplate
from megatron_ext.data.text.tokenizer import END_OF_TEXT, TextStream, Tokenizer, token_texts, train_bpe
from megatron_ext.errors import UserError
from tests.chats import put_wide_tokenizer
from tests.conftest import refused

TEXTS = [f"def function_{i}(value):\n    return value + {i}\n" for i in range(200)] + ["naïve 😀"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 400, path)
    return path


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@given(text=st.text() | st.just("a<|endoftext|>b"))
def test_round_trip(folder: Path, name: str, text: str) -> None:
    """A special token in a text is text."""
    tokenizer = Tokenizer(folder if name == "bpe" else name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.eod_id for token in ids)
    assert tokenizer.decode([tokenizer.eod_id]) == END_OF_TEXT
    assert name == "bpe" or bytes(ids) == text.encode()


def test_transformers_loads_it(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        reference = kind.from_pretrained(folder, local_files_only=True)
        assert reference.eos_token_id == tokenizer.eod_id
        assert reference.encode(TEXTS[7], add_special_tokens=False) == tokenizer.encode(TEXTS[7])
        assert reference.decode(tokenizer.encode(TEXTS[7])) == TEXTS[7]


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


NUMBERED = {"400": token("<|s|>", special=True), "401": token("<|e|>", special=True), "402": token("<tool>")}
STRIPS = {"7": token("<b>", lstrip=True), "9": token("<a>", rstrip=True, special=True), "0": token(END_OF_TEXT)}
MAP = {"eos_token": token("<|e|>"), "pad_token": "<pad>", "additional_special_tokens": ["<|s|>"]}


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({"added_tokens_decoder": NUMBERED, "eos_token": "<tool>"}, {}),
        ({"added_tokens_decoder": NUMBERED | STRIPS, "pad_token": "<pad>"}, {"special_tokens_map": MAP}),
        ({"added_tokens_decoder": NUMBERED}, {"added_tokens": {"<a>": 400}}),
        ({}, {"special_tokens_map": MAP, "added_tokens": {"<tool>": 401, "<pad>": 402, "<|s|>": 400}}),
        ({"eos_token": "<a>", "additional_special_tokens": ["<b>"]}, {"special_tokens_map": MAP}),
        ({"extra_special_tokens": ["<b>"], "image_token": "<image>"}, {"added_tokens": {"<b>": 401, "<a>": 400}}),
        ({"extra_special_tokens": {"image_token": "<i>"}}, {"special_tokens_map": {"extra_special_tokens": ["<a>"]}}),
        ({"eos_token": token("<|e|>", lstrip=True) | {"__type": "AddedToken"}}, {}),
        (None, {"special_tokens_map": MAP}),
    ],
)
def test_tokens_beside_the_file_are_transformers(folder: Path, tmp_path: Path, config, others: dict[str, Any]) -> None:
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}{{ image_token }}")
    plain = Tokenizer(tmp_path)
    config = config if config is None else {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    for name, content in {"tokenizer_config": config, **others}.items():
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "".join(
        f"x {token} y" for token in ("<|s|>", "<|e|>", "<tool>", "<a>", "<b>", "<pad>", "<image>", END_OF_TEXT)
    )
    assert tokenizer.encode_spelled(text)[0] == reference.encode(text, add_special_tokens=False)
    assert set(tokenizer.encode(text)).isdisjoint(reference.all_special_ids)
    assert (tokenizer.vocab_size, tokenizer.named) == (len(reference), dict(reference.special_tokens_map))
    assert set(reference.all_special_tokens) <= set(tokenizer.special.values())
    assert tokenizer.fingerprint != plain.fingerprint
    chat = [{"role": "user", "content": "x"}]
    assert ChatTemplate.of(tmp_path).render(chat)[0] == reference.apply_chat_template(chat, tokenize=False)


def test_tokens_that_cannot_be_read_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    for tokens in ({"1": "<a>"}, {"x": token("a")}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
        assert "correct its tokenizer_config" in refused(Tokenizer, tmp_path)


CHARACTERS = "▁ abcdefghijklmnopqrstuvwxyz<>/\n"
MERGES = [("<", "/"), ("</", "s"), ("</s", ">"), ("</s>", "a"), ("a", "b")]
PIECES = {piece: number for number, piece in enumerate([*CHARACTERS, *map("".join, MERGES), "<unk>", "<s>"])}
BYTES = {f"<0x{value:02X}>": len(PIECES) + value for value in range(256)}


@cache
def made(name: str) -> tokenizers.Tokenizer:
    """A tokenizer of each kind whose </s> is a piece of its model; only "level" names no special token."""
    scored = [(piece, 0.0 if "<" in piece and len(piece) > 1 else -len(piece) - 2.0) for piece in PIECES | BYTES]
    model: Any = {
        "unigram": lambda: models.Unigram(scored, PIECES["<unk>"], byte_fallback=True),
        "fallback": lambda: BPE(PIECES | BYTES, MERGES, unk_token="<unk>", byte_fallback=True),
        "whole": lambda: BPE(PIECES, MERGES, ignore_merges=True, unk_token="<unk>"),
        "level": lambda: WordLevel(PIECES, "<unk>"),
        "piece": lambda: models.WordPiece(
            PIECES | {f"##{text}": 400 + i for i, text in enumerate("sab.'")}, unk_token="<unk>"
        ),
        "suffix": lambda: BPE(PIECES | {f"{text}</w>": 400 + i for i, text in enumerate("sab.")}, []),
    }[name]()
    tokenizer = tokenizers.Tokenizer(model)
    replace = decoders.Replace("▁", " ")
    strip = decoders.Strip(" ", 1, 0)
    if name in ("unigram", "fallback"):
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    elif name == "whole":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if name in ("piece", "suffix"):
        tokenizer.decoder = decoders.WordPiece() if name == "piece" else decoders.BPEDecoder()
    if name != "level":
        tokenizer.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
        )
    return tokenizer


def put(name: str, folder: Path) -> Path:
    made(name).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["unigram", "fallback", "whole", "level", "piece"])
def test_no_text_gives_a_special_token(tmp_path: Path, name: str) -> None:
    """The ids equal the ids of a model that never had the piece; all others stay, and so do the special tokens' ids."""
    tokenizer = Tokenizer(put(name, tmp_path))
    original = made(name)
    for text in ("</s>", "ab </s>a </s> <s> <unk>", "a</s>b", "</s></s>"):
        ids = tokenizer.encode(text)
        assert PIECES["</s>"] not in ids
        assert PIECES["<s>"] not in ids or name == "level"  # an ordinary word, unless documents begin with it
        if name in ("unigram", "fallback"):
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode("ab ba b/a") == original.encode("ab ba b/a", add_special_tokens=False).ids
    assert tokenizer.eod_id == PIECES["</s>"]
    assert tokenizer.decode([tokenizer.eod_id]) == made(name).decode([tokenizer.eod_id], skip_special_tokens=False)
    assert Tokenizer(tmp_path, bos_token="<s>").encode("<s>") != [PIECES["<s>"]]


def test_a_given_end_token_is_no_text_either(tmp_path: Path) -> None:
    """An ordinary piece is left out of texts; a character cannot be, so texts with it are refused."""
    plain = Tokenizer(put("fallback", tmp_path))
    assert plain.encode("ab") == [PIECES["ab"]]
    assert Tokenizer(tmp_path, eod_token="ab").encode("ab") == [PIECES["a"], PIECES["b"]]
    for path, text in ((tmp_path, "one\ntwo"), ("bytes", "one\ntwo")):
        tokenizer = Tokenizer(path, eod_token="\n")
        assert tokenizer.eod_id not in tokenizer.encode("one")
        assert "pass another --eod-token" in refused(tokenizer.encode, text)
    added = made("fallback").from_str(made("fallback").to_str())
    added.add_tokens([AddedToken("<end>", normalized=False)])  # searched for in texts, because it is not special
    added.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("a<end>")) == 2
    assert len(Tokenizer(tmp_path, eod_token="<end>").encode("a<end>")) == 6


def test_a_normalizer_makes_no_special_token_in_a_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer(put("unigram", tmp_path))
    assert tokenizer.encode_spelled("a</s>b")[0] == [PIECES["a"], PIECES["</s>"], PIECES["b"]]
    assert "special token '</s>'" in refused(tokenizer.encode_spelled, "a\uff1c/s\uff1eb")
    assert tokenizer.decode(tokenizer.encode("a\uff1c/s\uff1eb")) == "a</s>b"


def test_settings_that_would_lose_text_are_off(folder: Path, tmp_path: Path) -> None:
    changed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=64)
    assert isinstance(changed.model, BPE)
    changed.model.dropout = 0.9
    changed.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode(TEXTS[0]) == Tokenizer(folder).encode(TEXTS[0])


def word_level(folder: Path, vocabulary: dict[str, int], config: object = None) -> Path:
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_end_tokens(tmp_path: Path) -> None:
    """The configuration names the token, by a name or an object, or it is a known one; ids may have gaps."""
    vocabulary = {"a": 0, "</s>": 4, "<end>": 9}
    named = {"eos_token": "<end>"}, {"eos_token": {"content": "<end>", "lstrip": False}}
    for config, eod in ((None, 4), ({"eos_token": None}, 4), *((entry, 9) for entry in named)):
        tokenizer = Tokenizer(word_level(tmp_path, vocabulary, config))
        assert (tokenizer.eod_id, tokenizer.vocab_size) == (eod, 10)
        assert Tokenizer(tmp_path, eod_token="a").eod_id == 0
    word_level(tmp_path, {"a": 0, "</s>": 1}, {"eos_token": "<new>"})
    assert (Tokenizer(tmp_path).eod_id, Tokenizer(tmp_path).vocab_size) == (2, 3)  # as transformers adds it
    word_level(tmp_path, {"a": 0}, {})
    assert "pass --eod-token" in refused(lambda: Tokenizer(tmp_path).eod_id)
    assert "'<eos>' is not in the vocabulary" in refused(Tokenizer, tmp_path, eod_token="<eos>")
    word_level(tmp_path, {"a": 0}, ["eos_token"])
    assert "tokenizer_config.json is not a JSON object" in refused(lambda: Tokenizer(tmp_path).eod_id)
    tokenizers.Tokenizer(WordLevel(vocabulary, "<unk>")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert "cannot encode a text" in refused(Tokenizer(tmp_path).encode, "</s>")


def test_a_panic_of_the_library_is_one_line(tmp_path: Path) -> None:
    """A character map that lacks what it maps to makes tokenizers panic, which Python sees as no Exception."""
    written = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=written, vocab_size=60, minloglevel=2)
    whole = ModelProto.FromString(written.getvalue()).normalizer_spec.precompiled_charsmap
    cut = whole[: 4 + int.from_bytes(whole[:4], "little")]
    tokenizer = tokenizers.Tokenizer(BPE({"a": 0, "</s>": 1}, []))
    tokenizer.normalizer = normalizers.Precompiled(cut)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = Tokenizer(tmp_path)
    assert "cannot encode a text" in refused(opened.encode, "\uff41")
    assert "cannot encode a chat" in refused(opened.encode_spelled, "\uff41")
    beside = {"added_tokens_decoder": {"2": token("\uff41", normalized=True)}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    assert "cannot normalize its added tokens" in refused(Tokenizer, tmp_path)


def test_other_files_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"AA== 0\n")
    for path in (tmp_path, tmp_path / "tokenizer.model", tmp_path / "missing"):
        assert "convert_tokenizer.py makes one" in refused(Tokenizer, path)


def test_settings_of_another_tokenizer_are_not_replaced(tmp_path: Path) -> None:
    """Or only if that is wanted, and then all of them: old ones add tokens."""
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):  # in the reverse order
        (tmp_path / name).write_text('{"<old>": 300}')
        assert f"{name} exists; pass --overwrite" in refused(train_bpe, TEXTS, 300, tmp_path)
    trained = train_bpe(TEXTS, 300, tmp_path, overwrite=True)
    assert set(trained.special.values()) == {END_OF_TEXT}


def test_tokens_at_borders_do_not_change_which_tokenizer_it_is(tmp_path: Path) -> None:
    folder = put_wide_tokenizer(tmp_path)
    assert Tokenizer(folder, eod_token="<tool>").fingerprint == Tokenizer(folder).fingerprint


def test_training_refusals(folder: Path, tmp_path: Path) -> None:
    def failing() -> Iterator[str]:
        yield "text"
        raise UserError("file:3: bad")

    for texts, message in (([], "no document"), (failing(), "file:3: bad")):
        assert message in refused(train_bpe, texts, 400, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert "vocab_size: got 256, needs at least 257" in refused(train_bpe, TEXTS, 256, tmp_path)
    assert train_bpe(TEXTS, 257, tmp_path).vocab_size == 257
    assert "exists; pass --overwrite" in refused(train_bpe, TEXTS, 400, tmp_path)
    assert train_bpe(TEXTS, 400, tmp_path, overwrite=True).fingerprint == Tokenizer(folder).fingerprint


TEXT = "Once upon a time 😀 naïve café — 漢字\n\n  spaces   end"
SCRIPTS = [TEXT, "中文字符 日本語 한국어 ภาษาไทย हिन्दी", " a  b, do n't .", "a b", "é"]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_streamed_pieces_are_the_text_in_complete_characters(folder: Path, name: str) -> None:
    tokenizer = Tokenizer(folder if name == "bpe" else name)
    pieces = token_texts(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(TEXT) / 4  # it comes in many pieces, not at the end


@pytest.mark.parametrize("name", ["bytes", "bpe", "unigram", "fallback", "whole", "level", "piece", "suffix"])
def test_streamed_pieces_joined_are_the_text_of_all_tokens(folder: Path, tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(name if name == "bytes" else folder if name == "bpe" else put(name, tmp_path))

    @given(
        st.one_of(st.sampled_from(SCRIPTS), st.text()), st.lists(st.integers(0, tokenizer.vocab_size + 3)), st.data()
    )
    @settings(max_examples=150, deadline=None)
    def check(text: str, more: list[int], data: st.DataObject) -> None:
        tokens = tokenizer.encode(text) + more
        assert "".join(token_texts(tokenizer, [*tokens, 0])) == tokenizer.decode([*tokens, 0])
        head = tokens[: data.draw(st.integers(0, len(tokens)))]
        stream = TextStream(tokenizer, head)
        answer = "".join(map(stream.put, tokens[len(head) :])) + stream.end()
        assert answer == tokenizer.continuation(head, tokens[len(head) :])
        if (whole := tokenizer.decode(tokens)).startswith(start := tokenizer.decode(head)):
            assert start + answer == whole

    check()
