"""Each policy against its definition, written out token by token."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext.data.packing.best_fit import best_fit_decreasing
from megatron_ext.data.packing.plan import PackingPlan
from megatron_ext.data.packing.policies import POLICIES, build_plan
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.packed import PackedRows
from tests.conftest import refused
from tests.data.packing.sources import (
    PAD,
    STRIDE,
    ListedSource,
    Piece,
    WrittenSource,
    input_tokens,
    row_lengths,
    rows_of,
    seeds,
    some_lengths,
    tokens_of,
)

OPTIONS = {"upsample_long": {"threshold": 5, "factor": 2.5}, "decomposition": {"shortest": 2}}


def build(policy: str, lengths: list[int], row_length: int, seed: int = 0) -> PackingPlan:
    source = ListedSource(lengths)
    return build_plan(policy, source, range(len(lengths)), row_length, seed, OPTIONS.get(policy))


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
def test_random_is_the_first_epoch_of_the_row_dataset(lengths: list[int], row_length: int, seed: int) -> None:
    plan = build("random", lengths, row_length, seed)
    dataset = RowDataset(ListedSource(lengths), range(len(lengths)), row_length, seed)
    rows = {dataset.row_index(sample): dataset.row(sample).tokens[:-1].tolist() for sample in range(plan.rows)}
    placed = [[d * STRIDE + s + i for d, s, n in pieces for i in range(n)] for pieces in rows_of(plan)]
    assert placed == [rows[row] for row in range(plan.rows)]


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
def test_drop_tail_takes_documents_until_the_row_is_full(lengths: list[int], row_length: int, seed: int) -> None:
    rows = rows_of(build("drop_tail", lengths, row_length, seed))
    order = [document for document, _, _ in itertools.chain(*rows)]
    assert sorted(order) == [document for document, length in enumerate(lengths) if length]
    expected: list[list[Piece]] = [[]]
    for document in order:
        space = row_length - sum(n for _, _, n in expected[-1])
        if not space:
            expected.append([])
            space = row_length
        expected[-1].append((document, 0, min(space, lengths[document])))
    assert rows == expected


@given(lengths=some_lengths, row_length=row_lengths)
def test_whole_document_and_split_drop(lengths: list[int], row_length: int) -> None:
    assume(max(lengths) >= row_length)
    whole, split = (rows_of(build(policy, lengths, row_length)) for policy in ("whole_document", "split_drop"))
    assert whole == split
    assert split == [[(d, k * row_length, row_length)] for d, n in enumerate(lengths) for k in range(n // row_length)]


def test_upsampling_within_sources_keeps_their_shares() -> None:
    """LCDE, worked by hand: long documents come to 70 % of each source's tokens, the sources keep their shares.

    Source 0 has 300 tokens in long documents and 700 in short ones: long ones stand 0.7 * 700 / (0.3 * 300) = 5.444
    times, its 1000 tokens become 2333.3. Source 1 has 500 and 500: 2.333 times, 1666.7. To be as many, source 1 as a
    whole stands 1.4 times: its long documents 3.267 times, short ones 1.4 times.
    """
    lengths = [30] * 10 + [10] * 70 + [50] * 10 + [10] * 50
    options = {"threshold": 20, "long_share": 0.7}
    plan = build_plan("upsample_long", ListedSource(lengths, [0] * 80 + [1] * 60), range(140), 16, 0, options)
    tokens = np.bincount(plan.pieces[:, 0], weights=plan.pieces[:, 2], minlength=140)
    copies = (tokens / lengths).round().astype(int)
    assert np.bincount(copies[:10]).tolist() == [0, 0, 0, 0, 0, 6, 4]  # 5.444: four of ten once more
    assert set(copies[10:80]) == {1}
    assert np.bincount(copies[80:90]).tolist() == [0, 0, 0, 7, 3]  # 3.267
    assert np.bincount(copies[90:]).tolist() == [0, 30, 20]  # 1.4
    for documents in (slice(0, 80), slice(80, 140)):
        assert tokens[documents].sum() == pytest.approx(2333, rel=0.02)
        long = np.array(lengths[documents]) > 20
        assert tokens[documents][long].sum() / tokens[documents].sum() == pytest.approx(0.7, abs=0.01)
    # sources are a part of the plan's key, lengths alone do not tell them
    assert plan.key.fingerprint != build_plan("upsample_long", ListedSource(lengths), range(140), 16, 0).key.fingerprint


@given(lengths=some_lengths, row_length=row_lengths, data=st.data())
def test_joined_sources_are_documents(lengths: list[int], row_length: int, data: st.DataObject) -> None:
    """The rows equal the rows of a data set that has one document of each source."""
    sources = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    texts = [[t for t in tokens_of(lengths) if sources[t // STRIDE] == number] for number in range(4)]
    assume(max(map(len, texts)) >= row_length)
    source = ListedSource(lengths, sources)
    whole = WrittenSource(texts)
    plan = build_plan("whole_document", source, range(len(lengths)), row_length, 0, {"join_sources": 1})
    wanted = build_plan("whole_document", whole, range(4), row_length, 0)
    mask_eod = data.draw(st.booleans())
    rows = PackedRows(source, plan, 0, mask_eod=mask_eod)
    wanted_rows = PackedRows(whole, wanted, 0)
    assert plan.rows == wanted.rows
    for number in range(plan.rows):
        row, wanted_row = rows.plan_row(number), wanted_rows.plan_row(number)
        np.testing.assert_array_equal(row.tokens[:-1], wanted_row.tokens[:-1])
        np.testing.assert_array_equal(row.trained[:-1], wanted_row.trained[:-1])
        assert set(row.document_ends.tolist()) <= {row_length}


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
def test_best_fit_cuts_only_documents_longer_than_a_row(lengths: list[int], row_length: int, seed: int) -> None:
    pieces = sorted(itertools.chain(*rows_of(build("best_fit", lengths, row_length, seed))))
    expected = [(d, s, min(row_length, n - s)) for d, n in enumerate(lengths) for s in range(0, n, row_length)]
    assert pieces == expected


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
def test_upsample_long_repeats_long_documents(lengths: list[int], row_length: int, seed: int) -> None:
    rows = PackedRows(ListedSource(lengths), build("upsample_long", lengths, row_length, seed), seed=1, pad_id=PAD)
    counts = input_tokens([rows.row(sample) for sample in range(rows.plan.rows)])
    copies = [counts[document * STRIDE] for document in range(len(lengths))]
    assert counts == Counter({token: copies[token // STRIDE] for token in tokens_of(lengths)})
    long = [count for count, length in zip(copies, lengths, strict=True) if length > 5]
    assert sorted(long) == [2] * (len(long) - round(len(long) / 2)) + [3] * round(len(long) / 2)
    assert {count for count, length in zip(copies, lengths, strict=True) if 0 < length <= 5} <= {1}


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_pure_and_the_seed_counts(policy: str) -> None:
    lengths = np.random.default_rng(0).integers(0, 60, 50).tolist()
    plan, again, plan_of_other_seed = (build(policy, lengths, 16, seed) for seed in (3, 3, 4))
    assert plan.key == again.key != plan_of_other_seed.key
    np.testing.assert_array_equal(plan.pieces, again.pieces)
    np.testing.assert_array_equal(plan.row_offsets, again.row_offsets)
    fixed = policy in ("whole_document", "split_drop")  # nothing is drawn but the order of rows
    assert np.array_equal(plan.pieces, plan_of_other_seed.pieces) == fixed
    split = build_plan(policy, ListedSource([16, 5, 0, 40, 16, 33, 20]), [6, 3, 2], 16, 0, OPTIONS.get(policy))
    assert set(split.pieces[:, 0].tolist()) == {3, 6}


@pytest.mark.parametrize(
    ("policy", "row_length", "options", "text"),
    [
        ("fill", 8, None, "no policy 'fill'; choose one of random,"),
        ("carry_over", 8, {"factor": 2}, "carry_over has no option 'factor'"),
        ("upsample_long", 8, {"factor": 0.5}, "factor: got 0.5, needs at least 1"),
        ("upsample_long", 8, {"factor": 2, "long_share": 0.5}, "factor beside long_share"),
        ("whole_document", 31, None, "makes no row of 31 tokens"),
        ("whole_document", 8, {"join_sources": 1}, "dataset names no sources"),
        ("decomposition", 8, {"shortest": 3}, "powers of two, but shortest is 3"),
        ("decomposition", 8, {"shortest": 16}, "shortest is 16; needs at most the 8 tokens"),
    ],
)
def test_refusals(policy: str, row_length: int, options: dict[str, float] | None, text: str) -> None:
    assert text in refused(build_plan, policy, ListedSource([30, 4, 0]), range(3), row_length, 0, options)


def one_by_one(sizes: list[int], capacity: int) -> Counter[int]:
    """The spaces left in the bins; which of two bins with the same space is taken makes no difference to them."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [space for space in spaces if space >= size]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - size)
    return Counter(spaces)


@given(capacity=st.integers(1, 30), data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_bins_are_those_of_one_by_one(capacity: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = best_fit_decreasing(np.array(sizes, dtype=np.int64), capacity)
    filled: dict[int, int] = defaultdict(int)
    for size, place in zip(sizes, bins.tolist(), strict=True):
        filled[place] += size
    assert sorted(filled) == list(range(len(filled)))
    assert Counter(capacity - total for total in filled.values()) == one_by_one(sizes, capacity)
