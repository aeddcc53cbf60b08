"""Rows of several data sets: sequences laid into rows, shares of the tokens."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.packing.policies import build_plan
from megatron_ext.data.rows.blend import BlendedRows, LaidSequences
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.packed import PackedRows
from tests.data.packing.sources import PAD, ListedSource, seeds, some_lengths


@given(lengths=some_lengths, length=st.sampled_from([1, 2, 4, 8]), count=st.sampled_from([1, 2, 4]), seed=seeds)
def test_sequences_fill_rows_as_separate_documents(lengths: list[int], length: int, count: int, seed: int) -> None:
    sequences = RowDataset(ListedSource(lengths), range(len(lengths)), length, seed)
    rows = LaidSequences(sequences, count * length)
    assert rows.row_tokens == rows.row_length == count * length
    for sample in range(3):
        row, parts = rows.row(sample), [sequences.row(sample * count + number) for number in range(count)]
        np.testing.assert_array_equal(row.tokens[:-1], np.concatenate([part.tokens[:-1] for part in parts]))
        assert (np.diff(row.document_ends) > 0).all()
        for number, part in enumerate(parts):
            first, last = number * length, (number + 1) * length
            inside = row.document_ends[(row.document_ends > first) & (row.document_ends < last)] - first
            np.testing.assert_array_equal(inside, part.document_ends[part.document_ends < length])
            assert last in row.document_ends or number == count - 1
            labels = row.tokens[1:][first:last]
            where = row.trained[first:last]
            np.testing.assert_array_equal(labels[where], part.tokens[1:][where])
            assert where.all() or (number < count - 1 and where[:-1].all() and not where[-1])


def test_shares_are_of_tokens_where_rows_have_padding() -> None:
    full = RowDataset(ListedSource([4096]), range(1), 8, 0)
    three_of_eight = ListedSource([3] * 64)
    padded = PackedRows(three_of_eight, build_plan("best_fit", three_of_eight, range(64), 4, 0), 0, pad_id=PAD)
    assert padded.row_tokens == 3
    blend = BlendedRows([full, LaidSequences(padded, 8)], [0.5, 0.5])
    found: Counter[str] = Counter()
    for sample in range(1400):
        tokens = blend.row(sample).tokens[:-1]
        source = "full" if blend.locate(sample)[0] == 0 else "padded"
        found[source] += int((tokens != PAD).sum())
    assert abs(found["full"] / found.total() - 0.5) < 1e-3
