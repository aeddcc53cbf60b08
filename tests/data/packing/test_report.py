"""The report against the rows that are really handed out, token by token."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.packing import PackedRows, PackingPlan, PackingPolicy, build_plan, report
from megatron_ext.data.rows.dataset import RowDataset, TokenRow
from megatron_ext.errors import UserError
from megatron_ext.layout import build_layout
from tests.data.packing.sources import (
    PAD,
    STRIDE,
    ListedSource,
    input_tokens,
    row_lengths,
    seeds,
    some_lengths,
    tokens_of,
)

OPTIONS = {
    "upsample_long": {"threshold": 5, "factor": 2.5},
    "decomposition": {"shortest": 1, "cycles": 2},
    "bm25": {"block_documents": 3},
}


def rows_of(plan: PackingPlan, source: ListedSource) -> list[TokenRow]:
    if plan.key.policy != "random":
        rows = PackedRows(source, plan, seed=0, pad_id=PAD)
        return [rows.row(sample) for sample in range(plan.rows)]
    documents = range(len(source.document_lengths))
    return list(map(RowDataset(source, documents, plan.row_length, plan.key.seed).row, range(plan.rows)))


def contexts(rows: list[TokenRow]) -> list[int]:
    """C_i of every token under the document mask, padding left out."""
    found = []
    for row in rows:
        layout = build_layout(len(row.tokens) - 1, row.document_ends, len(row.tokens) - 1)
        found += (layout.positions() + 1)[row.tokens[:-1] != PAD].tolist()
    return found


def truncated(rows: list[TokenRow], lengths: list[int]) -> set[int]:
    """Documents of which some run of tokens within a row is not the whole document."""
    cut = set()
    for row in rows:
        borders = [0, *row.document_ends.tolist(), len(row.tokens) - 1]
        for start, end in itertools.pairwise(borders):
            run = row.tokens[start:end].tolist()
            if run and run[0] != PAD and len(run) != lengths[run[0] // STRIDE]:
                cut.add(run[0] // STRIDE)
    return cut


@pytest.mark.parametrize("policy", [policy.value for policy in PackingPolicy])
@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
@settings(max_examples=40, deadline=None)
def test_the_report_is_what_the_rows_show(policy: str, lengths: list[int], row_length: int, seed: int) -> None:
    source, documents = ListedSource(lengths), range(len(lengths))
    if policy == "decomposition":
        row_length = 1 << row_length.bit_length() - 1
    try:
        plan = build_plan(policy, source, documents, row_length, seed, OPTIONS.get(policy))
    except UserError:
        assert policy in ("whole_document", "split_drop", "decomposition")
        return
    counted = report(plan, source, documents)
    rows = rows_of(plan, source)
    inputs, every = input_tokens(rows), set(tokens_of(lengths))
    places = [token for row in rows for token in row.tokens[:-1].tolist()]
    assert (counted.documents, counted.tokens) == (sum(map(bool, lengths)), sum(lengths))
    assert (counted.rows, counted.row_tokens) == (len(rows), len(places))
    assert counted.kept_tokens == len(every & set(inputs))
    assert counted.dropped_tokens == len(every - set(inputs))
    assert counted.repeated_tokens == inputs.total() - len(inputs)
    assert counted.padding_tokens == places.count(PAD)
    of_long = {token for token in every if lengths[token // STRIDE] >= row_length}
    assert (counted.long_tokens, counted.kept_long_tokens) == (len(of_long), len(of_long & set(inputs)))
    assert counted.dropped_documents == counted.documents - len({token // STRIDE for token in inputs})
    assert counted.truncated_documents == len(truncated(rows, lengths))
    found = contexts(rows)
    bins = Counter(int(context).bit_length() - 1 for context in found)
    assert counted.context_histogram == tuple(bins[b] for b in range(max(bins) + 1))
    assert counted.mean_context == pytest.approx(np.mean(found))


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
@settings(max_examples=60, deadline=None)
def test_what_policies_leave_out_is_known(lengths: list[int], row_length: int, seed: int) -> None:
    """Kept, dropped and padding by each policy's own definition."""
    source, documents = ListedSource(lengths), range(len(lengths))

    def dropped(policy: str, size: int = row_length) -> int:
        plan = build_plan(policy, source, documents, size, seed, OPTIONS.get(policy))
        return report(plan, source, documents).dropped_tokens

    for policy in ("random", "carry_over", "best_fit", "upsample_long", "bm25"):
        assert dropped(policy) == 0
    cut = build_plan("drop_tail", source, documents, row_length, seed).pieces
    assert sorted(cut[:, 0].tolist()) == [number for number, length in enumerate(lengths) if length]
    assert dropped("drop_tail") == sum(lengths[document] - kept for document, _, kept in cut.tolist())
    rows = {size: sum(n & size for n in lengths) // 16 for size in (1, 2, 4, 8)} | {16: sum(n // 16 for n in lengths)}
    if any(rows.values()):
        assert dropped("decomposition", 16) == sum(lengths) - 16 * sum(rows.values())
    if max(lengths) >= row_length:
        assert dropped("split_drop") == sum(length % row_length for length in lengths)
        assert dropped("whole_document") == dropped("split_drop")


def test_shares() -> None:
    source = ListedSource([6, 3, 0, 9])
    counted = report(build_plan("whole_document", source, range(4), 5, 0, {"rows_per_document": 1}), source, range(4))
    assert (counted.kept_share, counted.padding_share) == (10 / 18, 0)
    assert (counted.dropped_documents, counted.truncated_documents) == (1, 2)
    assert counted.context_histogram == (2, 4, 4)
    packed = report(build_plan("best_fit", source, [0, 1], 8, 0), source, [0, 1])
    assert (packed.kept_share, packed.padding_share) == (1, 7 / 16)


def test_a_document_given_twice_is_one() -> None:
    source = ListedSource([4, 4])
    counted = report(build_plan("carry_over", source, [0, 1, 1], 4, 0), source, [0, 1, 1])
    assert (counted.documents, counted.tokens, counted.kept_tokens, counted.repeated_tokens) == (2, 8, 8, 4)


@given(sizes=st.lists(st.integers(1, 70), min_size=1, max_size=5))
def test_the_histogram_counts_each_place(sizes: list[int]) -> None:
    source = ListedSource(sizes)
    counted = report(build_plan("carry_over", source, range(len(sizes)), 100, 0), source, range(len(sizes)))
    assert sum(counted.context_histogram) == sum(sizes)
    assert counted.row_tokens == counted.kept_tokens + counted.repeated_tokens + counted.padding_tokens


def test_what_each_policy_keeps_of_prolongs_long_documents() -> None:
    """Worked by hand: a target of 64 tokens, documents of 200 (a book), 64, 130 and 63 (too short for it).

    Whole rows: 3 x 64 of 200, 1 of 64, 2 x 64 of 130: 384 of the 394 tokens of long documents; the first row of each
    alone would be 192. Below 130: 200 and 130 belong to another part.
    """
    source, documents = ListedSource([200, 64, 130, 63]), range(4)

    def counted(policy: str, **options: int) -> tuple[int, int, int]:
        found = report(build_plan(policy, source, documents, 64, 0, options), source, documents)
        return found.rows, found.kept_long_tokens, found.long_tokens

    assert counted("whole_document") == (6, 384, 394)
    assert counted("whole_document", rows_per_document=1) == (3, 192, 394)
    assert counted("whole_document", below=130) == (1, 64, 394)
    assert counted("split_drop") == (6, 384, 394)
    assert counted("best_fit")[1:] == counted("carry_over")[1:] == (394, 394)


def test_what_is_kept_of_joined_books() -> None:
    """Worked by hand: subjects of 30 + 50 + 20, 10 + 5 and 64 tokens, rows of 32; alone, 50 and 64 are long.

    Joined: 96 of 100 and all of 64. Alone: 32 of 50 and all of 64. Every token of a row sees all before it.
    """
    source, documents = ListedSource([30, 10, 50, 5, 64, 20], sources=[0, 1, 0, 1, 2, 0]), range(6)
    joined = report(build_plan("whole_document", source, documents, 32, 0, {"join_sources": 1}), source, documents)
    alone = report(build_plan("whole_document", source, documents, 32, 0), source, documents)
    assert (joined.rows, joined.kept_long_tokens, joined.long_tokens) == (5, 160, 164)
    assert (alone.rows, alone.kept_long_tokens, alone.long_tokens) == (3, 96, 114)
    assert (joined.dropped_documents, joined.truncated_documents) == (2, 3)
    assert joined.mean_context == 16.5
    assert joined.context_histogram == (5, 10, 20, 40, 80, 5)
