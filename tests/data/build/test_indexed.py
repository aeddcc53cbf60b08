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
from megatron_ext.data.build.lengths import EDGES, NAMES, LengthTable
from megatron_ext.data.build.parts import Part, PartWriter, Record

Document = list[list[int]]
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=4), min_size=1, max_size=3))


def put(folder: Path, name: str, documents: list[Document], dtype: type) -> Part:
    part = Part(folder, name)
    with PartWriter(part) as writer:
        sequences = [ids for document in documents for ids in document]
        writer.write(np.array([token for ids in sequences for token in ids], dtype).tobytes())
        record = Record(len(documents), len(sequences), sum(map(len, sequences)))
        lengths = np.array([len(ids) for ids in sequences], np.int32)
        writer.finish(record, lengths=lengths, counts=np.array([len(d) for d in documents], np.int32))
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
    assert totals.documents == totals.lengths.documents.sum() == len(documents)
    assert totals.tokens == totals.lengths.tokens.sum() == sum(len(ids) for d in documents for ids in d)


@given(
    lengths=st.lists(st.one_of(st.integers(0, 2**21), st.sampled_from([2**k + d for k in range(20) for d in (-1, 0)])))
)
def test_lengths_fall_into_their_bins(lengths: list[int]) -> None:
    table = LengthTable()
    for part in (lengths[:3], lengths[3:]):
        table.add(np.array(part, np.int64))
    for number, (low, high) in enumerate(zip(EDGES, [*EDGES[1:], np.inf], strict=True)):
        inside = [length for length in lengths if low <= length < high]
        assert (table.documents[number], table.tokens[number]) == (len(inside), sum(inside))
    assert [row["documents"] for row in LengthTable.of_card(table.card()).card()] == table.documents.tolist()


def test_the_table_names_its_bins() -> None:
    table = LengthTable()
    table.add(np.array([1023, 1024, 3 * 1024, 600 * 1024]))
    rows = {row["length"]: row for row in table.card()}
    assert (rows["below 1K"]["documents"], rows["1K to 2K"]["documents"], rows["2K to 4K"]["documents"]) == (1, 1, 1)
    assert rows["512K and more"]["share_of_tokens"] == round(600 * 1024 / (1023 + 604 * 1024), 6)
    assert rows["256K to 512K"]["tokens"] == 0
    lines = str(table).splitlines()
    assert len(lines) == len(NAMES) + 4
    assert lines[-4].split() == ["512K", "and", "more", "1", "25.0%", "614,400", "99.2%"]
    assert lines[-3].split() == ["all", "4", "619,519"]
    assert lines[-2:] == [
        "mean 154,880, std 265,305, skewness 1.2, kurtosis -0.7",
        "min 1,023, P25 1,024, median 2,048, P75 155,904, max 614,400",
    ]
