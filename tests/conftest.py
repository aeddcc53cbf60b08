"""Fixtures of all tests, among them a small data set made once per session from this machine's own Python sources."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from launcher import Commands

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
def small_data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    """About 150K tokens in documents of 2 to some hundred tokens, so that short rows hold several ends."""
    folder = tmp_path_factory.mktemp("small_data")
    _tool("gather_corpus", "--output", folder / "packages.jsonl", "--max-bytes", 500_000)
    packages = [json.loads(line)["text"] for line in (folder / "packages.jsonl").read_text().splitlines()]
    with (folder / "corpus.jsonl").open("w") as file:
        for text in packages:
            file.writelines(json.dumps({"text": piece}) + "\n" for piece in _pieces(text))
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    trained = _tool("train_tokenizer", "--input", corpus, "--vocab-size", VOCABULARY, "--output", tokenizer)
    _tool("preprocess_data", "--input", corpus, "--output-prefix", folder / "corpus", "--tokenizer-model", tokenizer)
    return SmallData(folder / "corpus", tokenizer, eod=int(trained.rsplit("end token ", 1)[1]))


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


def _tool(name: str, *flags: object) -> str:
    command = [sys.executable, f"tools/{name}.py", *map(str, flags)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
