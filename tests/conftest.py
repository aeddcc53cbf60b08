"""Fixtures of all tests, among them a small data set that is the same on every machine.

Helpers are imported by their whole names, as `tests.runs`: every folder is a package, whichever way pytest is started.
Tests run on the CPU, whether or not there is a GPU. Those marked `gpu` can run on one: ON_GPU=1 runs them there, alone.
"""

import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from megatron_ext.data.text.tokenizer import Tokenizer, train_bpe
from megatron_ext.errors import UserError
from tests.checkpoint.models import write_model
from tests.launcher import Commands
from tests.runs import Launched

ON_GPU = "ON_GPU" in os.environ
if not ON_GPU:  # of all processes; CUDA asks at its first call, Triton as it is imported: its kernels then run on a CPU
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

for name in [name for name in os.environ if name.startswith("SLURM_")]:  # a job's, inside which tests run
    del os.environ[name]

settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no deadline")

ROOT = Path(__file__).resolve().parents[1]
# the processes that tests start run this checkout as well, also where another copy is installed
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
VOCABULARY = 1024
STORIES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


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
    slow = {"marks": pytest.mark.slow}
    return [
        value if value in quick else pytest.param(*(value if type(value) is tuple else [value]), **slow)
        for value in values
    ]


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The line with which a call refuses its input."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="session")
def small_data(alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    """About 150K tokens in documents of 2 to some hundred tokens, so that short rows hold several ends."""
    folder = tmp_path_factory.mktemp("small_data")
    texts = list(_texts())
    for name, documents in (("long", texts), ("corpus", [piece for text in texts for piece in _pieces(text)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    alone.run("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", VOCABULARY, "--output", tokenizer)
    flags = ["--input", corpus, "--output-prefix", folder / "corpus", "--tokenizer-model", tokenizer]
    alone.run("tools/preprocess_data.py", *flags)
    return SmallData(folder / "corpus", tokenizer, eod=Tokenizer(tokenizer).eod_id)


@pytest.fixture(scope="session")
def alone() -> Commands:
    """Runs any of the project's commands in one process, without importing Megatron again."""
    return Commands()


@pytest.fixture(scope="module")
def launched(small_data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(small_data.flags, tmp_path_factory.mktemp("launched"))


@pytest.fixture(scope="session")
def stories_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real Llama of 260K parameters beside this checkout, or of one of its sizes, drawn here."""
    folder = ROOT.parent / "shared" / "data" / "stories260k-hf"
    if (folder / "model.safetensors").is_file():
        return folder
    made = train_bpe(list(_texts()), STORIES["vocab_size"], tmp_path_factory.mktemp("stories") / "model").file.parent
    return write_model(made, "llama", **STORIES)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-of", type=int, default=1, metavar="N", help="of the chosen cases of each test every N-th")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    assert torch.cuda.is_available() == ON_GPU, "ON_GPU=1 needs a GPU that torch can see"
    deselected = [item for item in items if ON_GPU and item.get_closest_marker("gpu") is None]
    cases: dict[str, list[pytest.Item]] = defaultdict(list)  # by test
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    every = config.getoption("--one-of")
    deselected += [case for of_test in cases.values() for number, case in enumerate(of_test) if number % every]
    config.hook.pytest_deselected(items=deselected)
    left_out = set(deselected)
    items[:] = [item for item in items if item not in left_out]


def _texts() -> Iterator[str]:
    """Make 16 texts of 2K to 100K characters in a language that can be learned: few words may follow a word.

    Of `random` only what is the same in every version of Python.
    """
    draw = random.Random(0).random
    syllables = [consonant + vowel for consonant in "bcdfghklmnprstvz" for vowel in "aeiouéä"]
    words = ["".join(syllables[int(112 * draw())] for _ in range(1 + int(3 * draw()))) for _ in range(1500)]
    for length in range(16):
        text = ""
        word = 0
        while len(text) < 2000 * 1.3**length:
            follows = draw() < 0.8  # otherwise any, the first ones most often
            word = (17 * word + int(4 * draw() ** 2)) % 1500 if follows else int(1500 * draw() ** 3)
            text += words[word] + ("\n" if draw() < 0.02 else ". " if draw() < 0.1 else " ")
        yield text


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into documents of 1 to 1200 characters, short ones as often as long ones."""
    lengths = random.Random(len(text))
    start = 0
    while start < len(text):
        length = int(1200 ** lengths.random())
        yield text[start : start + length]
        start += length
