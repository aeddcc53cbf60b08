"""Tokenizers: exact round trips, end tokens, and training that repeats itself."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.models import BPE, WordLevel

from megatron_ext.data.text.tokenizer import TextStream, Tokenizer, train_bpe
from megatron_ext.errors import UserError

TEXTS = [f"def function_{i}(value):\n    return value + {i}\n" for i in range(200)] + ["naïve 😀"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 400, path)
    return path


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_round_trip(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_special_tokens_in_a_text_are_text(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    text = "a<|endoftext|>b"
    assert tokenizer.eod_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"


def test_transformers_loads_it(folder: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    ours = Tokenizer(folder)
    for theirs in (
        AutoTokenizer.from_pretrained(folder, local_files_only=True),
        PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True),
    ):
        assert theirs.eos_token_id == ours.eod_id
        assert theirs.encode(TEXTS[7], add_special_tokens=False) == ours.encode(TEXTS[7])
        assert theirs.decode(ours.encode(TEXTS[7])) == TEXTS[7]


def test_settings_that_would_lose_text_are_off(folder: Path, tmp_path: Path) -> None:
    changed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=64)
    assert isinstance(changed.model, BPE)
    changed.model.dropout = 0.9
    changed.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode(TEXTS[0]) == Tokenizer(folder).encode(TEXTS[0])


def word_level(folder: Path, vocabulary: dict[str, int], config: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "eod"),
    [
        (None, 4),
        ({"eos_token": "<end>"}, 9),
        ({"eos_token": {"content": "<end>", "lstrip": False}}, 9),
        ({"eos_token": None}, 4),
    ],
)
def test_end_token(tmp_path: Path, config: object, eod: int) -> None:
    tokenizer = Tokenizer(word_level(tmp_path, {"a": 0, "</s>": 4, "<end>": 9}, config))
    assert tokenizer.eod_id == eod
    assert tokenizer.vocab_size == 10  # ids may have gaps
    assert Tokenizer(tmp_path, eod_token="a").eod_id == 0


def test_end_token_refusals(tmp_path: Path) -> None:
    folder = word_level(tmp_path, {"a": 0})
    with pytest.raises(UserError, match="pass --eod-token"):
        _ = Tokenizer(folder).eod_id
    with pytest.raises(UserError, match="'<eos>' is not in the vocabulary"):
        Tokenizer(folder, eod_token="<eos>")
    word_level(tmp_path, {"a": 0, "</s>": 1}, {"eos_token": "<gone>"})
    with pytest.raises(UserError, match="'<gone>' is not in the vocabulary"):
        _ = Tokenizer(folder).eod_id
    word_level(tmp_path, {"a": 0}, ["eos_token"])
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not a JSON object"):
        _ = Tokenizer(folder).eod_id


@pytest.mark.parametrize("name", ["tokenizer.model", "cl100k_base.tiktoken"])
def test_other_files_are_refused_with_the_command_that_converts_them(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"AA== 0\n")
    for path in (tmp_path, tmp_path / name, tmp_path / "missing"):
        with pytest.raises(UserError, match=rf"{path} has no tokenizer\.json; .*convert_tokenizer\.py makes one"):
            Tokenizer(path)


@given(text=st.text())
def test_bytes(text: str) -> None:
    tokenizer = Tokenizer("bytes")
    assert bytes(tokenizer.encode(text)) == text.encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.decode([97, 256])) == (257, 256, "a<|endoftext|>")
    assert Tokenizer("bytes", eod_token="\n").eod_id == 10


def test_training_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size: got 256, needs at least 257"):
        train_bpe(TEXTS, 256, tmp_path)
    assert train_bpe(TEXTS, 257, tmp_path).vocab_size == 257
    with pytest.raises(UserError, match="exists; pass --overwrite"):
        train_bpe(TEXTS, 400, tmp_path)
    assert train_bpe(TEXTS, 400, tmp_path, overwrite=True).fingerprint == Tokenizer(folder).fingerprint
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match="no document"):
        train_bpe([], 400, tmp_path)
    with pytest.raises(UserError, match=r"^file:3: bad$"):
        train_bpe(failing(), 400, tmp_path)
    assert not tmp_path.exists()


def failing():
    yield "text"
    raise UserError("file:3: bad")


TEXT = "Once upon a time 😀 naïve café — 漢字\n\n  spaces   end"


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_streamed_pieces_are_the_text_in_complete_characters(folder: Path, name: str) -> None:
    tokenizer = Tokenizer(folder if name == "bpe" else name)
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
