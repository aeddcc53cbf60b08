"""Our reader and writer of Megatron's format against Megatron's own builder."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_ext.data.indexed import IndexedSource, document_lengths, dtype_of, join_arrays, write_dataset
from tests.conftest import refused
from tests.theirs import write_theirs

DOCUMENTS = [np.arange(start, start + length) for start, length in ((1, 5), (50, 1), (7, 30), (90, 9))]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    path = str(tmp_path / "sub" / "data")
    write_theirs(path, DOCUMENTS, 100)
    return path


def test_a_missing_file_is_named(prefix: str) -> None:
    for suffix in (".idx", ".bin"):
        os.rename(prefix + suffix, f"{prefix}.elsewhere")
        assert f"data{suffix} does not exist" in refused(IndexedSource, prefix)
        os.rename(f"{prefix}.elsewhere", prefix + suffix)


def test_damaged_indices_are_refused(prefix: str) -> None:
    idx = Path(prefix + ".idx")
    whole = idx.read_bytes()
    assert len(IndexedSource(prefix).document_lengths) == 4
    changed = [
        whole[:at] + value + whole[at + len(value) :]
        for at, value in (
            (9, b"\x02"),  # version 2
            (17, b"\x06"),  # float64
            (34, b"\x06"),  # the first sequence's length
            (len(whole) - 8, b"\x03"),  # the last document's end
            (len(whole) - 16, b"\x09"),  # the second last document's: after the last one's
            (len(whole) - 16, b"\xff" * 8),  # before the first
        )
    ]
    for content in (b"", whole[:20], whole[:-1], *changed):
        idx.write_bytes(content)
        assert "is not a Megatron index of integer tokens, or is damaged" in refused(IndexedSource, prefix)


def test_a_bin_that_does_not_fit_its_index_is_refused(prefix: str) -> None:
    content = Path(prefix + ".bin").read_bytes()
    for wrong in (content[:-2], content + b"\0\0"):
        Path(prefix + ".bin").write_bytes(wrong)
        assert f".bin has {len(wrong)} bytes, but " in refused(IndexedSource, prefix)
    os.truncate(prefix + ".bin", 0)
    assert "is damaged or empty" in refused(IndexedSource, prefix)


def test_token_ids_beyond_the_vocabulary_are_refused(prefix: str) -> None:
    source = IndexedSource(prefix, vocab_size=98)
    assert source.read(3, 0, 8).max() == 97
    assert "document 3 holds token id 98 at position 8, but vocab_size is 98" in refused(source.read, 3, 2, 7)


def test_weights_and_masks_are_read_with_the_tokens(prefix: str) -> None:
    plain = IndexedSource(prefix, 100)
    assert plain.read_weights(0, 0, 5) is None
    assert plain.read_mask(0, 0, 5) is True
    tokens = np.concatenate(DOCUMENTS)
    np.save(f"{prefix}.weights.npy", tokens.astype(np.float32) / 8)
    np.save(f"{prefix}.mask.npy", (tokens % 2).astype(np.uint8))
    source = IndexedSource(prefix, 100, weighted=True)
    assert source.document_lengths.dtype == source.read(0, 0, 5).dtype == np.int64
    for number, document in enumerate(DOCUMENTS):
        for offset in range(len(document)):
            place = (number, offset, len(document) - offset)
            np.testing.assert_array_equal(source.read(*place), document[offset:])
            np.testing.assert_array_equal(source.read_weights(*place), document[offset:] / 8)
            np.testing.assert_array_equal(source.read_mask(*place), document[offset:] % 2 == 1)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_weights_out_of_range_are_refused(prefix: str, bad: float) -> None:
    weights = np.ones(45, dtype=np.float32)
    weights[8] = bad  # document 2 begins at token 6
    np.save(f"{prefix}.weights.npy", weights)
    source = IndexedSource(prefix, 100, weighted=True)
    assert source.read_weights(2, 0, 2) is not None
    assert " at token 2, needs finite numbers >= 0" in refused(source.read_weights, 2, 1, 5)


def test_files_of_another_shape_or_dtype_are_refused(prefix: str) -> None:
    assert "weights.npy does not exist" in refused(IndexedSource, prefix, 100, weighted=True)
    for wrong in (np.ones(44, dtype=np.float32), np.ones(45)):
        np.save(f"{prefix}.weights.npy", wrong)
        assert "needs float32 (45,)" in refused(IndexedSource, prefix, 100, weighted=True)
    np.save(f"{prefix}.weights.npy", np.array([{}] * 45, dtype=object), allow_pickle=True)
    assert "weights.npy cannot be read" in refused(IndexedSource, prefix, 100, weighted=True)
    np.save(f"{prefix}.mask.npy", np.ones(45))
    assert "needs uint8 (45,)" in refused(IndexedSource, prefix)


Document = list[list[int]]
some_documents = st.lists(st.lists(st.lists(st.integers(0, 65_498), min_size=1, max_size=4), max_size=3))


def put(folder: Path, name: str, documents: list[Document], dtype: np.dtype) -> Path:
    part = folder / name
    sequences = [ids for document in documents for ids in document]
    part.with_suffix(".bin").write_bytes(np.array([token for ids in sequences for token in ids], dtype).tobytes())
    lengths, counts = (np.array([len(item) for item in items], np.int32) for items in (sequences, documents))
    no_sources = {"sources": np.zeros(0, np.int32), "source_names": np.zeros(0, np.str_)}
    np.savez(part.with_suffix(".npz"), lengths=lengths, counts=counts, **no_sources)
    return part


@given(parts=st.lists(some_documents, max_size=4), vocab_size=st.sampled_from([65_499, 65_500]))
def test_the_same_bytes_as_megatrons_builder(tmp_path_factory: pytest.TempPathFactory, parts, vocab_size) -> None:
    """Documents have several sequences or none; they are read as they were given."""
    folder = tmp_path_factory.mktemp("indexed")
    parts = [*parts, [[[1, 2], [3]]]]
    dtype = dtype_of(vocab_size)
    metadata = {"vocab_size": vocab_size, "chat_template": None, "source_field": None}
    written = [put(folder, f"{number}", documents, dtype) for number, documents in enumerate(parts)]
    arrays, _ = join_arrays(written)
    write_dataset(str(folder / "ours"), folder, written, arrays, metadata)
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    documents = [document for part in parts for document in part]
    for document in documents:
        for ids in document:
            builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(str(folder / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (folder / f"ours{suffix}").read_bytes() == (folder / f"theirs{suffix}").read_bytes()
    source = IndexedSource(folder / "theirs")
    texts = [list(itertools.chain(*document)) for document in documents]
    for lengths in (document_lengths(arrays["lengths"], arrays["counts"]), source.document_lengths):
        assert lengths.tolist() == [len(text) for text in texts]
    for number, text in enumerate(texts):
        assert not text or source.read(number, 0, len(text)).tolist() == text
