"""Documents whose tokens say where they come from, and lengths around every border that matters."""

from collections import Counter

import numpy as np
from hypothesis import strategies as st

from megatron_ext.data.packing.plan import PackingPlan
from megatron_ext.data.row import RowSource, TokenRow

Piece = tuple[int, int, int]  # document, start, length
STRIDE = 1000  # token p of document d is d * STRIDE + p
PAD = -1

row_lengths = st.sampled_from([1, 2, 3, 5, 8, 16])
seeds = st.integers(0, 2**64 - 1)
some_lengths = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 2, 3, 5, 8, 16, 17, 32, 48])), min_size=1, max_size=14
).filter(any)


class ListedSource:
    """Documents of the given lengths; `reads` lists what was read."""

    def __init__(self, lengths: list[int], sources: list[int] | None = None) -> None:
        self.document_lengths = np.array(lengths, dtype=np.int64)
        self.document_sources = None if sources is None else np.array(sources, dtype=np.int32)
        self.reads: list[tuple[int, int, int]] = []

    def lengths_in(self, documents: range) -> np.ndarray:
        return self.document_lengths[documents.start : documents.stop]

    def tokens_in(self, documents: range) -> int:
        return int(self.lengths_in(documents).sum())

    def document_length(self, document: int) -> int:
        return int(self.document_lengths[document])

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        assert 0 <= offset < offset + length <= self.document_lengths[document]
        self.reads.append((document, offset, length))
        return np.arange(offset, offset + length, dtype=np.int64) + document * STRIDE

    def read_mask(self, document: int, offset: int, length: int) -> np.ndarray | bool:
        return True

    def read_weights(self, document: int, offset: int, length: int) -> np.ndarray | None:
        return None


class MaskedSource(ListedSource):
    """Even documents train every third token, odd ones have no mask."""

    def read_mask(self, document: int, offset: int, length: int) -> np.ndarray | bool:
        return True if document % 2 else self.read(document, offset, length) % 3 == 0


class WrittenSource(ListedSource):
    def __init__(self, documents: list[list[int]]) -> None:
        super().__init__([len(document) for document in documents])
        self.documents = documents

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        assert 0 <= offset < offset + length <= len(self.documents[document])
        return np.array(self.documents[document][offset : offset + length], dtype=np.int64)


def rows_of(plan: PackingPlan) -> list[list[Piece]]:
    return [[tuple(piece) for piece in plan.row_pieces(row).tolist()] for row in range(plan.rows)]


def tokens_of(lengths: list[int]) -> list[int]:
    return [document * STRIDE + position for document, count in enumerate(lengths) for position in range(count)]


def input_tokens(rows: list[TokenRow]) -> Counter[int]:
    """Count how often each token is an input of the rows, without padding."""
    counts = Counter(token for row in rows for token in row.tokens[:-1].tolist())
    del counts[PAD]
    return counts


def assert_outlined(rows: RowSource, sample: int) -> None:
    """Compare the outline of a row with the row itself."""
    row, outline = rows.row(sample), rows.outline(sample)
    np.testing.assert_array_equal(outline.document_ends, row.document_ends)
    np.testing.assert_array_equal(outline.trained, row.trained)


def assert_same(row: TokenRow, expected: TokenRow) -> None:
    np.testing.assert_array_equal(row.tokens, expected.tokens)
    np.testing.assert_array_equal(row.document_ends, expected.document_ends)
    np.testing.assert_array_equal(row.trained, expected.trained)
    assert (row.tokens.dtype, row.document_ends.dtype, row.trained.dtype) == (np.int64, np.int64, np.bool_)
