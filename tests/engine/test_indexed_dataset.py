"""Our reader and writer of Megatron's format, against Megatron's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_ext.data.dataset import RowDataset
from megatron_ext.data.preprocess import WriteCounts
from megatron_ext.engine.indexed_dataset import IndexedSource, write_indexed
from megatron_ext.errors import UserError

DOCUMENTS = [np.arange(start, start + length) for start, length in ((1, 5), (50, 1), (7, 30), (90, 9))]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    path = str(tmp_path / "sub" / "data")
    assert write_indexed(path, DOCUMENTS, 100) == WriteCounts(4, 45)
    return path


def change(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, np.uint16), (65499, np.uint16), (65500, np.int32)])
def test_megatron_reads_what_we_write(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    path = str(tmp_path / "data")
    write_indexed(path, iter(DOCUMENTS), vocab_size)
    theirs = IndexedDataset(path)
    assert theirs.index.dtype == dtype
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    for sequence, document in zip(theirs[0:4], DOCUMENTS, strict=True):
        np.testing.assert_array_equal(sequence, document)


def test_reading_parts(prefix: str) -> None:
    source = IndexedSource(prefix, 100)
    assert source.document_lengths.tolist() == [5, 1, 30, 9]
    assert source.document_lengths.dtype == np.int64
    for number, document in enumerate(DOCUMENTS):
        for offset in range(len(document)):
            part = source.read(number, offset, len(document) - offset)
            np.testing.assert_array_equal(part, document[offset:])
            assert part.dtype == np.int64
    assert source.read(2, 3, 4).tolist() == [10, 11, 12, 13]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """What Megatron's own tools may write: sentences as sequences, and a document without any."""
    path = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(path + ".bin", dtype=np.uint16)
    for document in ([[1, 2, 3], [4]], [], [[5, 6], [7], [8, 9]]):
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(path + ".idx")
    source = IndexedSource(path)
    assert source.document_lengths.tolist() == [4, 0, 5]
    assert source.read(0, 0, 4).tolist() == [1, 2, 3, 4]
    assert source.read(2, 1, 4).tolist() == [6, 7, 8, 9]
    tokens = RowDataset(source, range(3), 9, seed=0).row(0).tokens[:9]
    assert sorted(tokens.tolist()) == list(range(1, 10))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix: str, suffix: str) -> None:
    os.unlink(prefix + suffix)
    with pytest.raises(UserError, match=rf"data\{suffix} does not exist.*tools/preprocess_data\.py"):
        IndexedSource(prefix)


def test_damaged_indices_are_named(prefix: str) -> None:
    idx = prefix + ".idx"
    whole = Path(idx).read_bytes()

    def refused(text: str) -> None:
        with pytest.raises(UserError, match=text) as caught:
            IndexedSource(prefix)
        assert "\n" not in str(caught.value)
        Path(idx).write_bytes(whole)
        assert len(IndexedSource(prefix).document_lengths) == 4

    change(idx, 0, b"PK")
    refused(r"data\.idx is not a Megatron index \(it starts with b'PK")
    Path(idx).write_bytes(b"")
    refused("is not a Megatron index")
    os.truncate(idx, 20)
    refused("truncated .20 bytes, its header alone")
    os.truncate(idx, len(whole) - 1)
    refused(rf"truncated \({len(whole) - 1} bytes, needs {len(whole)}\)")
    change(idx, 9, b"\x02")
    refused("format version 2")
    change(idx, 17, b"\x06")  # float64
    refused("dtype code 6")
    change(idx, 34, b"\x06")  # the first sequence's length
    refused("do not lie side by side")
    change(idx, len(whole) - 8, b"\x03")  # the last document's end
    refused("4 sequences, but its documents end at 3")


def test_a_truncated_bin_is_named(prefix: str) -> None:
    os.truncate(prefix + ".bin", 89)
    with pytest.raises(UserError, match=r"data\.bin is truncated \(89 bytes, its index says 90\)"):
        IndexedSource(prefix)
    os.truncate(prefix + ".bin", 0)
    with pytest.raises(UserError, match="empty data set"):
        IndexedSource(prefix)


def test_foreign_token_ids_are_named(prefix: str) -> None:
    source = IndexedSource(prefix, vocab_size=98)
    assert source.read(3, 0, 8).max() == 97
    with pytest.raises(UserError, match=r"document 3 holds token id 98 at position 8, but vocab_size is 98"):
        source.read(3, 2, 7)
    assert IndexedSource(prefix).read(3, 8, 1).tolist() == [98]


@pytest.mark.parametrize("token", [100, -1, 70000])
def test_ids_out_of_range_are_not_written(tmp_path: Path, token: int) -> None:
    with pytest.raises(UserError, match=f"document 1 holds token id {token} at position 2"):
        write_indexed(tmp_path / "data", [DOCUMENTS[0], np.array([1, 2, token])], 100)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("documents", [[], [np.array([], dtype=np.int64)]])
def test_nothing_is_not_written(tmp_path: Path, documents: list[np.ndarray]) -> None:
    with pytest.raises(UserError, match="without a single token"):
        write_indexed(tmp_path / "data", documents, 100)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_old_data(prefix: str) -> None:
    def broken() -> Iterator[np.ndarray]:
        yield DOCUMENTS[2]
        raise OSError("No space left on device")

    folder = Path(prefix).parent
    old = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(OSError, match="No space left"):
        write_indexed(prefix, broken(), 100)
    assert {file: file.read_bytes() for file in folder.iterdir()} == old


def test_a_new_data_set_takes_an_old_card_away(prefix: str) -> None:
    card = Path(prefix + ".json")
    write_indexed(prefix, DOCUMENTS[:2], 100, card=lambda counts: {"tokens": counts.tokens})
    assert card.read_text() == '{\n  "tokens": 6\n}\n'
    write_indexed(prefix, DOCUMENTS[:1], 100)
    assert not card.exists()
    assert IndexedSource(prefix).document_lengths.tolist() == [5]


KILLED = """
import os, signal, sys, pathlib
import numpy as np
from megatron_ext.engine.indexed_dataset import write_indexed
prefix, moment = sys.argv[1], int(sys.argv[2])
rename, moves = pathlib.Path.replace, 0
def replace(path, target):
    global moves
    if moves == moment:
        os.kill(os.getpid(), signal.SIGKILL)
    moves += 1
    return rename(path, target)
pathlib.Path.replace = replace
write_indexed(prefix, [np.full(1000, 3)] * 50, 100, card=lambda counts: {})
"""


@pytest.mark.parametrize("moment", [0, 2])
def test_a_kill_leaves_nothing_readable(prefix: str, moment: int) -> None:
    """Killed before the first and before the last rename, over an old data set: absent, never a mixture."""
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, prefix, str(moment)], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = sorted(Path(prefix).parent.iterdir())
    assert any(file.suffix == ".partial" for file in left)
    for name in {str(file)[: -len(file.suffix)] for file in left} | {prefix}:
        assert not IndexedDataset.exists(name)
        with pytest.raises(UserError, match="does not exist"):
            IndexedSource(name)


def test_weights_beside_the_tokens(prefix: str) -> None:
    weights = np.concatenate(DOCUMENTS).astype(np.float32) / 8
    np.save(f"{prefix}.weights.npy", weights)
    source = IndexedSource(prefix, 100, weighted=True)
    for document, tokens in enumerate(DOCUMENTS):
        for offset in range(len(tokens)):
            read = source.read_weights(document, offset, len(tokens) - offset)
            np.testing.assert_array_equal(read, tokens[offset:] / 8)
    assert IndexedSource(prefix, 100).read_weights(0, 0, 5) is None


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_weight_that_is_none(prefix: str, bad: float) -> None:
    weights = np.ones(45, dtype=np.float32)
    weights[8] = bad  # document 2 begins at token 6
    np.save(f"{prefix}.weights.npy", weights)
    source = IndexedSource(prefix, 100, weighted=True)
    assert source.read_weights(2, 0, 2) is not None
    with pytest.raises(UserError, match=r"document 2 has weight .* at token 2, needs finite numbers >= 0"):
        source.read_weights(2, 1, 5)


def test_weights_that_do_not_fit(prefix: str) -> None:
    with pytest.raises(UserError, match=r"weights\.npy cannot be read"):
        IndexedSource(prefix, 100, weighted=True)
    for wrong in (np.ones(44, dtype=np.float32), np.ones(45), np.ones((45, 1), dtype=np.float32)):
        np.save(f"{prefix}.weights.npy", wrong)
        with pytest.raises(UserError, match=r"needs float32 \(45,\): one weight for each token"):
            IndexedSource(prefix, 100, weighted=True)
    np.save(f"{prefix}.weights.npy", np.array([{}] * 45, dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"weights\.npy cannot be read"):
        IndexedSource(prefix, 100, weighted=True)
