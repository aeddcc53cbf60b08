"""RowDataset against naive concatenation, BlendedRows against a sorted list of events; sequences laid into rows."""

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.packing.policies import build_plan
from megatron_ext.data.row import TokenRow
from megatron_ext.data.rows.blend import BlendedRows, LaidSequences
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.packed import PackedRows
from tests.conftest import refused
from tests.data.packing.sources import PAD, STRIDE, ListedSource, MaskedSource, assert_outlined, assert_same, seeds

some_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)
row_lengths = st.integers(1, 25)


def make(lengths: list[int], row_length: int, seed: int = 0, **options: bool) -> RowDataset:
    return RowDataset(ListedSource(lengths), range(len(lengths)), row_length, seed, **options)


class WeightedSource(MaskedSource):
    """A token's weight is half its id."""

    def read_weights(self, document: int, offset: int, length: int) -> np.ndarray | None:
        return (self.read(document, offset, length) / 2).astype(np.float32)


@given(lengths=some_lengths, row_length=row_lengths, mask_eod=st.booleans())
def test_a_label_has_its_own_mask_and_weight(lengths: list[int], row_length: int, mask_eod: bool) -> None:
    rows = RowDataset(WeightedSource(lengths), range(len(lengths)), row_length, seed=3, mask_eod=mask_eod)
    for sample in range(5):
        row = rows.row(sample)
        for place, label in enumerate(row.tokens[1:].tolist()):
            held = label // STRIDE % 2 == 1 or label % 3 == 0
            assert row.trained[place] == (held and not (mask_eod and place + 1 in row.document_ends))
        assert row.weights.dtype == np.float32
        np.testing.assert_array_equal(row.weights, row.tokens[1:] / 2)
        assert make(lengths, row_length, 3).row(sample).weights is None


def naive_order(count: int, seed: int, epoch: int, purpose: int) -> list[int]:
    words = np.random.Philox(key=np.array([seed, 2 * epoch + purpose], dtype=np.uint64)).random_raw(count)
    return sorted(range(count), key=words.tolist().__getitem__)


def naive_samples(lengths: list[int], row_length: int, seed: int, epochs: int) -> list[TokenRow]:
    """The samples that start in the first `epochs`, by concatenating lists and searching through them."""
    whole = [d for d, length in enumerate(lengths) if length]
    total = sum(lengths)
    stream: list[int] = []
    last: list[bool] = []
    for epoch in range(epochs + row_length // total + 2):
        for place in naive_order(len(whole), seed, epoch, 0):
            document = whole[place]
            stream += [document * STRIDE + position for position in range(lengths[document])]
            last += [False] * (lengths[document] - 1) + [True]
    samples = []
    for epoch in range(epochs):
        rows = [r for r in range(len(stream)) if epoch * total <= r * row_length < (epoch + 1) * total]
        for place in naive_order(len(rows), seed, epoch, 1):
            start = rows[place] * row_length
            ends = [e for e in range(1, row_length + 1) if last[start + e - 1]]
            trained = [not last[start + i] for i in range(row_length)]
            samples.append(
                TokenRow(np.array(stream[start : start + row_length + 1]), np.array(ends, int), np.array(trained))
            )
    return samples


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
def test_rows_equal_naive_concatenation(lengths: list[int], row_length: int, seed: int) -> None:
    dataset = make(lengths, row_length, seed, mask_eod=True)
    for sample, row in enumerate(naive_samples(lengths, row_length, seed, epochs=4)):
        assert_same(dataset.row(sample), row)
        assert_outlined(dataset, sample)


def test_the_order_never_changes() -> None:
    """A row drawn today is the row of every later version, of numpy too."""
    dataset = make([1] * 8, row_length=2, seed=1234)
    rows = [(dataset.row(sample).tokens // STRIDE).tolist() for sample in range(4)]
    assert rows == [[7, 3, 0], [4, 2, 5], [0, 1, 4], [5, 6, 7]]


def test_only_the_documents_of_the_row_are_read() -> None:
    source = ListedSource([50] * 20)
    RowDataset(source, range(20), 10, seed=3).row(17)
    assert sum(length for _, _, length in source.reads) == 11
    assert "has no tokens" in refused(make, [0, 0], 4)


def blend(weights: list[float]) -> BlendedRows:
    datasets = [make([7, 5], 4, seed) for seed in range(len(weights))]
    return BlendedRows(datasets, weights, [str(number) for number in range(len(weights))])


weird_weights = st.lists(
    st.one_of(st.floats(1e-9, 1e9), st.sampled_from([1e-200, 1e-12, 0.1, 0.2, 0.3, 1 / 3, 0.5, 1.0, math.pi, 1e12])),
    min_size=1,
    max_size=6,
)


@given(weights=weird_weights)
def test_blend_equals_the_sorted_events(weights: list[float]) -> None:
    rows = blend(weights)
    count = 60
    events = [((k + 0.5) / w, d, k) for d, w in enumerate(rows.weights) for k in range(count)]
    expected = [(d, k) for _, d, k in sorted(events)[:count]]
    assert [rows.locate(sample) for sample in range(count)] == expected
    for samples in (range(0), range(7), range(7, count)):
        counted = Counter(expected[sample][0] for sample in samples)
        assert rows.rows_of(samples) == {str(d): counted[d] for d in range(len(weights))}


@given(weights=weird_weights, start=st.sampled_from([0, 1, 999, 10**6, 10**9, 10**12, 10**15]))
def test_blend_reads_each_dataset_in_order_and_in_proportion(weights: list[float], start: int) -> None:
    rows = blend(weights)
    drawn: dict[int, int] = {}
    for sample in range(start, start + 50):
        dataset, number = rows.locate(sample)
        if start == 0 or dataset in drawn:
            assert number == drawn.get(dataset, 0)
        drawn[dataset] = number + 1
        share = rows.weights[dataset]
        bound = (1 + share * max(0, len(weights) - 2)) / 2
        assert abs(drawn[dataset] - (sample + 1) * share) <= bound + 1e-3 + 1e-15 * start


@given(lengths=some_lengths, length=st.sampled_from([1, 2, 4, 8]), count=st.sampled_from([1, 2, 4]), seed=seeds)
def test_sequences_fill_rows_as_separate_documents(lengths: list[int], length: int, count: int, seed: int) -> None:
    sequences = make(lengths, length, seed)
    rows = LaidSequences(sequences, count * length)
    assert rows.row_tokens == rows.row_length == count * length
    for sample in range(3):
        assert_outlined(rows, sample)
        row = rows.row(sample)
        parts = [sequences.row(sample * count + number) for number in range(count)]
        np.testing.assert_array_equal(row.tokens[:-1], np.concatenate([part.tokens[:-1] for part in parts]))
        assert (np.diff(row.document_ends) > 0).all()
        for number, part in enumerate(parts):
            first = number * length
            last = (number + 1) * length
            inside = row.document_ends[(row.document_ends > first) & (row.document_ends < last)] - first
            np.testing.assert_array_equal(inside, part.document_ends[part.document_ends < length])
            assert last in row.document_ends or number == count - 1
            labels = row.tokens[1:][first:last]
            where = row.trained[first:last]
            np.testing.assert_array_equal(labels[where], part.tokens[1:][where])
            assert where.all() or (number < count - 1 and where[:-1].all() and not where[-1])


def test_shares_are_of_tokens_where_rows_have_padding() -> None:
    source = ListedSource([3] * 64)
    padded = LaidSequences(PackedRows(source, build_plan("best_fit", source, range(64), 4, 0), 0, pad_id=PAD), 8)
    assert (padded.row(0).tokens[:-1] != PAD).sum() == padded.row_tokens == 6
    rows = BlendedRows([make([4096], 8), padded], [0.5, 0.5], ["full", "padded"])
    assert rows.rows_of(range(1400)) == {"full": 600, "padded": 800}
