"""Fixtures of all tests, among them a small data set made once per session from this machine's own Python sources."""

import json
import os
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from launcher import Commands

from megatron_ext.data.text.tokenizer import Tokenizer

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks as it is imported: its kernels then run on a CPU

settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no deadline")

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 1024


@dataclass(frozen=True)
class SmallData:
    """A data set and its tokenizer.

    Attributes:
        prefix: of .bin and .idx.
        tokenizer: folder with tokenizer.json.
        eod: the end-of-document token.
    """

    prefix: Path
    tokenizer: Path
    eod: int

    @property
    def flags(self) -> list[str]:
        """The trainer's flags for it."""
        return ["--data-path", str(self.prefix), "--tokenizer-model", str(self.tokenizer)]


def slow_but(quick: Collection[object], values: Iterable[object]) -> list[object]:
    """Return the values as parameters of a test; all but the quick ones are slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(scope="session")
def small_data(alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    """About 150K tokens in documents of 2 to some hundred tokens, so that short rows hold several ends."""
    folder = tmp_path_factory.mktemp("small_data")
    alone.run("tools/gather_corpus.py", "--output", folder / "packages.jsonl", "--max-bytes", 500_000)
    packages = [json.loads(line)["text"] for line in (folder / "packages.jsonl").read_text().splitlines()]
    with (folder / "corpus.jsonl").open("w") as file:
        for text in packages:
            file.writelines(json.dumps({"text": piece}) + "\n" for piece in _pieces(text))
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    alone.run("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", VOCABULARY, "--output", tokenizer)
    made = ["--input", corpus, "--output-prefix", folder / "corpus", "--tokenizer-model", tokenizer]
    alone.run("tools/preprocess_data.py", *made)
    return SmallData(folder / "corpus", tokenizer, eod=Tokenizer(tokenizer).eod_id)


@pytest.fixture(scope="session")
def alone() -> Commands:
    """Runs any of the project's commands in one process, without importing Megatron again."""
    return Commands()


@pytest.fixture(scope="session")
def stories_model() -> Path:
    """A real Llama of 260K parameters with its tokenizer, as a Hugging Face folder beside this checkout."""
    folder = ROOT.parent / "shared" / "data" / "stories260k-hf"
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"no {folder}")
    return folder


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into documents of 1 to 1200 characters, short ones as often as long ones."""
    lengths = random.Random(len(text))
    start = 0
    while start < len(text):
        length = int(1200 ** lengths.random())
        yield text[start : start + length]
        start += length
