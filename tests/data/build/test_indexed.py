"""Parts put together, against Megatron's own builder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext.data.build.indexed import Totals, write_dataset
from megatron_ext.data.build.parts import Part, Record

Document = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=4), min_size=1, max_size=3))


def put(folder: Path, name: str, documents: list[Document], dtype: type) -> Part:
    part = Part(folder, name)
    sequences = [ids for document in documents for ids in document]
    part.content.write_bytes(np.array([token for ids in sequences for token in ids], dtype).tobytes())
    record = Record(len(documents), len(sequences), sum(map(len, sequences)))
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    part.finish(record, lengths=lengths, counts=np.array([len(d) for d in documents], np.int32))
    return part


@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4), dtype=st.sampled_from([np.uint16, np.int32]))
@settings(max_examples=60, deadline=None)
def test_the_same_bytes_as_megatrons_builder(tmp_path_factory: pytest.TempPathFactory, parts, dtype) -> None:
    folder = tmp_path_factory.mktemp("indexed")
    written = [put(folder, f"{number}", documents, dtype) for number, documents in enumerate(parts)]
    totals = Totals.of(written)
    write_dataset(str(folder / "ours"), folder, written, dtype, totals, {"tokens": totals.tokens})
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=dtype)
    documents = [document for part in parts for document in part]
    for document in documents:
        for ids in document:
            builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(str(folder / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (folder / f"ours{suffix}").read_bytes() == (folder / f"theirs{suffix}").read_bytes()
    assert totals.documents == sum(row["documents"] for row in totals.lengths) == len(documents)
    assert totals.tokens == sum(row["tokens"] for row in totals.lengths)
    assert totals.tokens == sum(len(ids) for d in documents for ids in d)
