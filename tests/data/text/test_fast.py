"""Encoding with gigatoken: the ids of tokenizers, or not used at all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megatron_ext.data.text import fast
from megatron_ext.data.text.tokenizer import HF_FILE, Tokenizer, train_bpe
from megatron_ext.errors import UserError

pytest.importorskip("gigatoken", reason="the extra fast is not installed")
ROOT = Path(__file__).resolve().parents[3]
TEXTS = ["the quick brown fox doesn't jump over 12345 lazy dogs\n", "naïve 😀 中国 e\u0301"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("tokenizer")).file.parent


def test_ids_are_those_of_tokenizers() -> None:
    """A small part of the fuzz of benchmarks/."""
    command = [sys.executable, "benchmarks/fuzz_ids.py", "--texts", "2000", "--shapes", "Llama 3", "Qwen 2", "Llama 2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode == 0, run.stdout + run.stderr
    assert [one["different"] for one in found] == [0, 0, 0]


def test_special_tokens_of_a_text_are_ordinary(folder: Path) -> None:
    opened = Tokenizer(folder, encoder="gigatoken")
    ids = opened.encode_array("fox<|endoftext|>fox").tolist()
    assert opened.eod_id not in ids
    assert opened.decode(ids) == "fox<|endoftext|>fox"


@pytest.mark.parametrize("text", ["\U0010ffff", "a\U00040000b", "\u0378"])
def test_texts_with_unknown_characters_are_left_to_tokenizers(folder: Path, text: str) -> None:
    opened = Tokenizer(folder, encoder="gigatoken")
    assert opened.fast is not None
    assert not opened.fast.serves(text)
    assert opened.fast.serves("naïve 😀 中国 e\u0301")
    assert opened.encode_array(text).tolist() == opened.encode(text)


def test_memory_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids stay the same when gigatoken is loaded anew, which it is after much text if the process has grown."""
    opened = Tokenizer(folder, encoder="gigatoken")
    assert opened.fast is not None
    first = opened.fast._loaded
    much = "fox jumps " * (fast.MEASURED_EVERY // 10 + 1)
    opened.fast(much)
    assert opened.fast._loaded is first
    monkeypatch.setattr(opened.fast, "_most", 0)  # what a machine gives back to a process is not for a test to know
    opened.fast(TEXTS[1])
    assert opened.fast._loaded is first
    assert opened.fast(much).tolist() == opened.encode(much)
    assert opened.fast._loaded is not first


def changed(folder: Path, target: Path, path: list[Any], value: object) -> Path:
    about = json.loads((folder / HF_FILE).read_text())
    place = about
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (target / HF_FILE).write_text(json.dumps(about))
    return target


POSSESSIVE = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
                r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["normalizer"], {"type": "Lowercase"}),
        (["pre_tokenizer", "add_prefix_space"], True),
        (["pre_tokenizer"], {"type": "Whitespace"}),
        (["pre_tokenizer"], POSSESSIVE),
    ],
)
def test_other_tokenizers_are_for_tokenizers(folder: Path, tmp_path: Path, path: list[Any], value: object) -> None:
    other = changed(folder, tmp_path, path, value)
    opened = Tokenizer(other, encoder="auto")
    assert opened.fast is None
    assert opened.encoder.startswith("tokenizers")
    with pytest.raises(UserError, match="gigatoken cannot serve"):
        Tokenizer(other, encoder="gigatoken")


def test_an_end_token_that_texts_spell_is_refused_by_tokenizers(folder: Path) -> None:
    opened = Tokenizer(folder, eod_token="f", encoder="auto")
    with pytest.raises(UserError, match="would hold the special token"):
        opened.encode_array("fox f")


def test_added_tokens_that_take_spaces_are_for_tokenizers(folder: Path, tmp_path: Path) -> None:
    library = Tokenizer(folder)._library
    assert library is not None
    for token, served in ((AddedToken("<call>"), True), (AddedToken("<call>", rstrip=True), False)):
        other = type(library).from_str(library.to_str())
        other.add_tokens([token])
        other.save(str(tmp_path / HF_FILE))
        opened = Tokenizer(tmp_path, encoder="auto")
        assert (opened.fast is not None) is served
        assert opened.encode_array("a <call>  b").tolist() == opened.encode("a <call>  b")


def test_without_the_package_tokenizers_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "installed_version", lambda _: None)
    assert Tokenizer(folder, encoder="auto").fast is None
    with pytest.raises(UserError, match="pip install gigatoken"):
        Tokenizer(folder, encoder="gigatoken")
