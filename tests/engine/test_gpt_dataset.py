"""Megatron-Core's GPTDataset reads our files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_ext.data.build.preprocess import PreprocessOptions, preprocess

LENGTH = 16
TEXTS = [f"{i}: {'naïve ' * (i * 7 % 11)}" for i in range(40)]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "corpus.jsonl").write_text(rows)
    preprocess(PreprocessOptions([str(tmp_path / "corpus.jsonl")], str(tmp_path / "data"), "bytes", shard_bytes=500))
    return str(tmp_path / "data")


def documents() -> list[list[int]]:
    return [[*text.encode(), 256] for text in TEXTS]


def their_dataset(prefix: str, samples: int) -> GPTDataset:
    tokenizer = SimpleNamespace(vocab_size=257, eod=256, pad=-1, unique_identifiers={"class": "bytes"})
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=None,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    indices = np.arange(len(TEXTS), dtype=np.int32)
    return GPTDataset(IndexedDataset(prefix), prefix, indices, samples, Split.train, config)


def test_megatrons_dataset_reads_ours(prefix: str) -> None:
    """Its samples, put back into the order before its shuffle, are the documents in the order that it drew."""
    texts = documents()
    stream_length = sum(map(len, texts))
    theirs = their_dataset(prefix, (stream_length - 1) // LENGTH)
    order = np.argsort(theirs.shuffle_index)
    samples = [theirs[int(place)] for place in order]
    stream = [token for number in theirs.document_index for token in texts[number]]
    assert len(samples) == (stream_length - 1) // LENGTH > 20
    assert sorted(theirs.document_index.tolist()) == list(range(len(TEXTS)))
    for number, sample in enumerate(samples):
        start = number * LENGTH
        assert sample["tokens"].tolist() == stream[start : start + LENGTH]
        assert sample["labels"].tolist() == stream[start + 1 : start + LENGTH + 1]
