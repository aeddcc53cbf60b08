"""Encoding with gigatoken: the ids of tokenizers, or not used at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from megatron_ext.data.text import fast
from megatron_ext.data.text.tokenizer import HF_FILE, Tokenizer, train_bpe
from tests.conftest import ROOT, refused

pytest.importorskip("gigatoken", reason="the extra fast is not installed")
TEXTS = ["the quick brown fox doesn't jump over 12345 lazy dogs\n", "naïve 😀 中国 e\u0301"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("tokenizer")).file.parent


def test_ids_are_those_of_tokenizers() -> None:
    """A small part of the fuzz of benchmarks/."""
    command = [sys.executable, "benchmarks/fuzz_ids.py", "--texts", "2000", "--shapes", "Llama 3", "Qwen 2", "Llama 2"]
    command.append("DeepSeek 3")
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    records = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode == 0, run.stdout + run.stderr
    assert [record["different"] for record in records] == [0, 0, 0, 0]


def test_special_tokens_of_a_text_are_ordinary(folder: Path) -> None:
    ids = Tokenizer(folder, encoder="gigatoken").encode_array("fox<|endoftext|>fox").tolist()
    assert ids == Tokenizer(folder).encode("fox<|endoftext|>fox")
    ended = Tokenizer(folder, eod_token="f", encoder="auto")
    assert "would hold the special token" in refused(ended.encode_array, "fox f")


def test_texts_with_unknown_characters_are_left_to_tokenizers(folder: Path) -> None:
    opened = Tokenizer(folder, encoder="gigatoken")
    assert opened.fast is not None
    assert opened.fast.serves("naïve 😀 中国 e\u0301")
    for text in ("\U0010ffff", "a\U00040000b", "\u0378"):
        assert not opened.fast.serves(text)
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


CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
CL100K += r"|\s+(?!\S)|\s+"  # with possessive quantifiers
OWN = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"  # gigatoken refuses it with a RuntimeError


def by(pattern: str) -> pre_tokenizers.Sequence:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def test_other_tokenizers_are_for_tokenizers(folder: Path, tmp_path: Path) -> None:
    library = Tokenizer(folder)._library
    assert library is not None
    for name, part, served in (
        ("normalizer", normalizers.Lowercase(), False),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True), False),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), False),
        ("pre_tokenizer", by(CL100K), False),
        ("pre_tokenizer", by(OWN), False),
        ("added", AddedToken("<call>", rstrip=True), False),
        ("added", AddedToken("<call>"), True),
        ("normalizer", normalizers.Sequence([]), True),
    ):
        changed = type(library).from_str(library.to_str())
        if isinstance(part, AddedToken):
            changed.add_tokens([part])
        else:
            setattr(changed, name, part)
        changed.save(str(tmp_path / HF_FILE))
        opened = Tokenizer(tmp_path, encoder="auto")
        assert (opened.fast is not None) is served, part
        assert opened.encode_array("a <call>  b").tolist() == opened.encode("a <call>  b")
        if not served:
            assert "gigatoken cannot serve" in refused(Tokenizer, tmp_path, encoder="gigatoken")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kinds", ["00", "01", "10", "11"])
def test_added_tokens_that_overlap_are_found_as_tokenizers_does(
    folder: Path, tmp_path: Path, kinds: str, special: bool
) -> None:
    """tokenizers looks for normalized tokens last, and skips special ones; gigatoken looks for all others at once."""
    for first, second, text in (
        ("ab", "bc", "xabcx"),
        ("bc", "ab", "xabcx"),
        ("abc", "b", "xabcx"),
        ("b", "abc", "abc"),
    ):
        library = tokenizers.Tokenizer.from_file(str(folder / HF_FILE))
        library.add_tokens([AddedToken(first, normalized=kinds[0] == "1", special=special)])
        library.add_tokens([AddedToken(second, normalized=kinds[1] == "1")])
        library.save(str(tmp_path / HF_FILE))
        opened = Tokenizer(tmp_path, encoder="auto")
        assert opened.encode_array(text).tolist() == opened.encode(text)
        assert kinds[0] != kinds[1] or special or opened.fast is not None


def test_auto_leaves_gigatoken_where_it_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may raise any exception, also when it is loaded anew or encodes."""
    monkeypatch.setattr(fast, "MEASURED_EVERY", 0)
    for encoder in ("auto", "gigatoken"):
        opened = Tokenizer(folder, encoder=encoder)
        assert opened.fast is not None
        with pytest.raises(fast.UnservedError, match="cannot encode"):
            opened.fast("\udc00")
        monkeypatch.setattr(opened.fast, "_json", "{}")
        monkeypatch.setattr(opened.fast, "_most", 0)
        if encoder == "gigatoken":
            assert "gigatoken cannot serve" in refused(opened.encode_array, TEXTS[0])
        else:
            assert opened.encode_array(TEXTS[0]).tolist() == opened.encode(TEXTS[0])
            assert opened.fast is None
            assert opened.encoder.startswith("tokenizers")


def test_without_the_package_tokenizers_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "installed_version", lambda _: None)
    assert Tokenizer(folder, encoder="auto").fast is None
    assert "pip install gigatoken" in refused(Tokenizer, folder, encoder="gigatoken")
