"""Joined parts, against Megatron's own builder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext.data.indexed import document_lengths, dtype_of, join_arrays, write_dataset

Document = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=4), min_size=1, max_size=3))


def put(folder: Path, name: str, documents: list[Document], dtype: np.dtype) -> Path:
    part = folder / name
    sequences = [ids for document in documents for ids in document]
    part.with_suffix(".bin").write_bytes(np.array([token for ids in sequences for token in ids], dtype).tobytes())
    arrays = {
        "lengths": np.array([len(ids) for ids in sequences], np.int32),
        "counts": np.array([len(document) for document in documents], np.int32),
        "sources": np.zeros(0, np.int32),
        "source_names": np.zeros(0, np.str_),
    }
    np.savez(part.with_suffix(".npz"), **arrays)
    return part


@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4), vocab_size=st.sampled_from([60_001, 70_000]))
@settings(max_examples=60, deadline=None)
def test_the_same_bytes_as_megatrons_builder(tmp_path_factory: pytest.TempPathFactory, parts, vocab_size) -> None:
    folder = tmp_path_factory.mktemp("indexed")
    dtype, metadata = dtype_of(vocab_size), {"vocab_size": vocab_size, "chat_template": None, "source_field": None}
    written = [put(folder, f"{number}", documents, dtype) for number, documents in enumerate(parts)]
    arrays, _ = join_arrays(written)
    write_dataset(str(folder / "ours"), folder, written, arrays, metadata)
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=dtype.type)
    documents = [document for part in parts for document in part]
    for document in documents:
        for ids in document:
            builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(str(folder / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (folder / f"ours{suffix}").read_bytes() == (folder / f"theirs{suffix}").read_bytes()
    lengths = document_lengths(arrays["lengths"], arrays["counts"])
    assert lengths.tolist() == [sum(map(len, document)) for document in documents]
