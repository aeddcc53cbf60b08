"""Buckets together, and the schedule of batches, against lists."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext.data.packing import BucketSchedule, build_buckets, report
from megatron_ext.errors import UserError
from tests.data.packing.sources import ListedSource, some_lengths

OPTIONS = {"shortest": 4, "longest": 16}


@given(lengths=some_lengths)
@settings(max_examples=100, deadline=None)
def test_buckets_hold_all_but_short_remainders(lengths: list[int]) -> None:
    assume(max(lengths) >= 4)
    source = ListedSource(lengths)
    plans = build_buckets(source, range(len(lengths)), 0, OPTIONS)
    sizes = [plan.row_length for plan in plans]
    assert sizes == sorted(set(sizes))
    assert set(sizes) <= {4, 8, 16}
    tokens = [(d, s + i) for plan in plans for d, s, n in plan.pieces.tolist() for i in range(n)]
    assert sorted(tokens) == [(d, i) for d, n in enumerate(lengths) for i in range(n // 4 * 4)]
    counted = report(plans, source, range(len(lengths)))
    assert counted.dropped_tokens == sum(length % 4 for length in lengths)
    assert (counted.padding_tokens, counted.repeated_tokens) == (0, 0)
    cut = [length for length in lengths if length >= 4 and length not in (4, 8, 16)]
    assert counted.truncated_documents == len(cut)


def test_no_document_long_enough() -> None:
    with pytest.raises(UserError, match="no document has 4 tokens"):
        build_buckets(ListedSource([3, 2]), range(2), 0, OPTIONS)
    assert [plan.row_length for plan in build_buckets(ListedSource([3, 4]), range(2), 0, OPTIONS)] == [4]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    lengths = sorted(draw(st.sets(st.sampled_from([2, 4, 8, 16]), min_size=1)))
    counts = [draw(st.integers(1, 60)) for _ in lengths]
    tokens = lengths[-1] * draw(st.integers(1, 3))
    assume(any(count * length >= tokens for count, length in zip(counts, lengths, strict=True)))
    return lengths, counts, tokens, draw(st.integers(1, 4))


@given(given_=schedules())
@settings(max_examples=150, deadline=None)
def test_batches_of_an_epoch(given_: tuple[list[int], list[int], int, int]) -> None:
    lengths, counts, tokens, cycles = given_
    schedule = BucketSchedule(lengths, counts, tokens, cycles)
    whole = [count * length // tokens for count, length in zip(counts, lengths, strict=True)]
    expected = []
    for cycle in range(cycles):
        for bucket, batches in enumerate(whole):
            expected += [bucket] * ((cycle + 1) * batches // cycles - cycle * batches // cycles)
    assert schedule.steps_per_epoch == len(expected) == sum(whole)
    drawn: Counter[int] = Counter()
    for step in range(3 * len(expected)):
        batch = schedule.batch(step)
        assert batch.bucket == expected[step % len(expected)]
        assert batch.rows * lengths[batch.bucket] == tokens
        assert batch.first_sample == drawn[batch.bucket]
        drawn[batch.bucket] += batch.rows


def test_cycles_run_from_short_to_long() -> None:
    for cycles in (1, 8):
        schedule = BucketSchedule([256, 512, 1024], [4000, 2000, 1000], 4096, cycles)
        buckets = [schedule.batch(step).bucket for step in range(schedule.steps_per_epoch)]
        assert Counter(buckets) == {0: 250, 1: 250, 2: 250}
        falls = sum(later < earlier for earlier, later in itertools.pairwise(buckets))
        assert falls == cycles - 1


@pytest.mark.parametrize(
    ("lengths", "counts", "tokens", "cycles", "text"),
    [
        ([4, 8], [9, 9], 8, 0, "cycles is 0"),
        ([4, 8], [9, 9], 12, 1, "a batch of 12 tokens is no whole number of rows of 8"),
        ([4, 8], [9, 9], 0, 1, "a batch of 0 tokens"),
        ([4, 8], [1, 1], 16, 1, "no bucket fills a batch of 16 tokens"),
    ],
)
def test_refusals(lengths: list[int], counts: list[int], tokens: int, cycles: int, text: str) -> None:
    with pytest.raises(UserError, match=text):
        BucketSchedule(lengths, counts, tokens, cycles)
    assert BucketSchedule([4, 8], [9, 1], 8, 1).steps_per_epoch == 5
