"""Supervised fine-tuning from end to end: chats, plan, training; the loss is the assistant's alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.text.tokenizer import Tokenizer
from tests.chats import END, MARKED, START, conversations, put_chats, put_tokenizer
from tests.launcher import Commands
from tests.runs import read_jsonl

PREPROCESS, PACK, TRAIN = "tools/preprocess_data.py", "tools/pack_data.py", "pretrain_skyladder.py"
LENGTH, BATCH, STEPS = 256, 4, 3


@pytest.fixture(scope="module")
def folder(alone: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tokenizer`, and the dataset `chats` of 90 conversations."""
    folder = tmp_path_factory.mktemp("sft")
    put_tokenizer(folder / "tokenizer", MARKED)
    put_chats(folder / "chats.jsonl", conversations(90))
    flags = ["--input", folder / "chats.jsonl", "--output-prefix", folder / "chats", "--messages-field"]
    alone.run(PREPROCESS, *flags, "--tokenizer-model", folder / "tokenizer")
    return folder


def flags(folder: Path, *more: object) -> list[object]:
    data = ["--data-path", folder / "chats", "--tokenizer-model", folder / "tokenizer", "--split", "1,0,0"]
    model = ["--num-layers", 1, "--hidden-size", 32, "--ffn-hidden-size", 64, "--num-attention-heads", 2]
    training = ["--train-iters", STEPS, "--global-batch-size", BATCH, "--lr-warmup-iters", 1, "--eval-interval", 0]
    return [*data, *model, *training, "--seq-length", LENGTH, "--document-mask", *more]


def spoken(tokens: list[int], tokenizer: Tokenizer) -> Iterator[bool]:
    """Whether each token is the assistant's, read from the tokens alone: what follows its heading, up to the end."""
    heading = tokenizer.encode_spelled(f"{START}assistant\n")[0]
    ((end,), _) = tokenizer.encode_spelled(END)
    inside = False
    for place, token in enumerate(tokens):
        inside = inside or tokens[max(place - len(heading), 0) : place] == heading
        yield inside
        inside = inside and token != end


@pytest.mark.parametrize("packing", ["drop_tail", "random"])
def test_the_loss_counts_the_assistants_tokens_alone(
    alone: Commands, folder: Path, tmp_path: Path, packing: str
) -> None:
    options = flags(folder, "--packing", packing)
    if packing != "random":
        alone.run(PACK, *options)
    alone.run(TRAIN, *options, "--save", tmp_path / "run", "--dump-trajectory", tmp_path / "dump")
    metrics, tokenizer = read_jsonl(tmp_path / "run" / "metrics.jsonl"), Tokenizer(folder / "tokenizer")
    assert len(metrics) == STEPS
    for step, told in enumerate(metrics):
        dumped = np.load(tmp_path / "dump" / f"step_{step:06}.npz")
        mask = dumped["loss_mask"].astype(bool)
        assert told["denominator"] == mask.sum() > 0
        assert not mask.all()
        for tokens, held in zip(dumped["tokens"].tolist(), mask.tolist(), strict=True):
            first = tokens.index(tokenizer.encode_spelled(START)[0][0])  # before it: `random` cuts anywhere
            assert held[first:] == list(spoken(tokens[first:], tokenizer))[1:]
