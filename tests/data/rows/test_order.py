"""The order of a large data set is kept in files: the same rows as without them, drawn once."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data import row as row_module
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.packing.plan import fingerprint
from megatron_ext.data.packing.policies import build_plan
from megatron_ext.data.row import Purpose, permutation
from megatron_ext.data.rows import dataset as dataset_module
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.packed import PackedRows
from megatron_ext.errors import UserError
from tests.data.packing.sources import assert_same
from tests.theirs import write_theirs

LENGTHS = [5, 0, 1, 30, 9, 2, 17, 0, 4, 11]
ROW = 8
SEED = 3


@pytest.fixture(autouse=True)
def keep_orders_of_few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("data.rows.dataset", "data.rows.packed", "data.packing.plan"):
        monkeypatch.setattr(f"megatron_ext.{module}.LARGE", 1)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_theirs(tmp_path / "data", [np.arange(length) + 1 for length in LENGTHS], 100)
    return tmp_path / "data"


def open_rows(prefix: Path, cache: Path | None, *, seed: int = SEED, prepares: bool = False) -> RowDataset:
    return RowDataset(IndexedSource(prefix), range(1, len(LENGTHS)), ROW, seed, cache=cache, prepares=prepares)


def refuse_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*_: object) -> None:
        raise AssertionError("the order is kept, but was drawn again")

    monkeypatch.setattr(dataset_module, "draw_order", draw)


def test_kept_orders_give_the_same_rows(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [open_rows(prefix, None).row(sample) for sample in range(40)]  # four epochs
    drawn = open_rows(prefix, tmp_path / "cache")
    for sample, row in enumerate(expected):
        assert_same(drawn.row(sample), row)
    refuse_to_draw(monkeypatch)
    kept = open_rows(prefix, tmp_path / "cache")
    for sample, row in reversed(list(enumerate(expected))):
        assert_same(kept.row(sample), row)


def test_another_index_under_the_same_name_is_drawn_again(prefix: Path, tmp_path: Path) -> None:
    open_rows(prefix, tmp_path / "cache").row(0)
    write_theirs(prefix, [np.arange(length) + 1 for length in reversed(LENGTHS)], 100)
    for sample in range(20):
        assert_same(open_rows(prefix, tmp_path / "cache").row(sample), open_rows(prefix, None).row(sample))


def test_a_place_outside_of_its_document_is_refused(prefix: Path, tmp_path: Path) -> None:
    open_rows(prefix, tmp_path / "cache").row(0)
    for file in tmp_path.glob("cache/*/documents.npy"):
        documents = np.load(file)
        np.save(file, documents + documents.dtype.type(100))
    with pytest.raises(UserError, match="is damaged; remove the folder"):
        open_rows(prefix, tmp_path / "cache").row(0)


@pytest.mark.parametrize("seed", range(5))
def test_the_next_epoch_is_drawn_before_it_is_needed(prefix: Path, tmp_path: Path, seed: int) -> None:
    """The row that ends in the next epoch may be any sample."""
    rows = open_rows(prefix, tmp_path / "cache", seed=seed)
    last_row = rows.tokens_per_epoch // ROW
    order = [rows.row_index(sample) for sample in range(last_row + 1)]
    (tmp_path / "cache").rename(tmp_path / "other")
    rows = open_rows(prefix, tmp_path / "cache", seed=seed, prepares=True)
    for sample in range(order.index(last_row)):
        rows.row(sample)
    rows.row_index(order.index(last_row))
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name == "1":
            thread.join()
    assert len(list(tmp_path.glob("cache/*/documents.npy"))) == 2


def test_a_plans_fingerprint_and_row_order_are_kept(prefix: Path, tmp_path: Path) -> None:
    source = IndexedSource(prefix)
    documents = range(len(LENGTHS))
    expected = fingerprint(source, documents)
    plan = build_plan("best_fit", source, documents, ROW, SEED)
    plain = PackedRows(source, plan, SEED)
    kept = PackedRows(source, plan, SEED, cache=tmp_path / "cache")
    for _ in range(2):
        assert fingerprint(IndexedSource(prefix), documents, tmp_path / "cache") == expected
    assert [kept.row_index(sample) for sample in range(50)] == [plain.row_index(sample) for sample in range(50)]
    os.utime(f"{prefix}.idx", (0, 0))
    assert fingerprint(IndexedSource(prefix), documents, tmp_path / "cache") == expected
    assert len(list(tmp_path.glob("cache/*/sha256.npy"))) == 2


def test_equal_words_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The permutation sorts keys of the words' upper bits; words that are equal there must be told apart."""
    draw = np.random.default_rng(0)
    for count in range(1, 60):
        distinct_words = draw.integers(2**64, size=6, dtype=np.uint64)
        close_words = distinct_words[0] ^ np.arange(6, dtype=np.uint64)  # these differ in the lowest bits alone
        words = draw.choice(np.concatenate([distinct_words, close_words]), count)
        monkeypatch.setattr(row_module, "random_words", lambda *_, words=words: words)
        expected = np.argsort(words, kind="stable")
        np.testing.assert_array_equal(permutation(count, 0, 0, Purpose.ROWS), expected)
