"""Rows of plans: inputs, labels, ends and trained positions, token by token; and the report against these rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.packing.plan import PackingPlan
from megatron_ext.data.packing.policies import POLICIES, build_plan
from megatron_ext.data.packing.report import report
from megatron_ext.data.row import TokenRow
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.packed import PackedRows
from megatron_ext.errors import UserError
from megatron_ext.layout import build_layout
from tests.data.packing.sources import (
    PAD,
    STRIDE,
    ListedSource,
    MaskedSource,
    assert_outlined,
    assert_same,
    input_tokens,
    row_lengths,
    seeds,
    some_lengths,
    tokens_of,
)

SOME_POLICIES = st.sampled_from(["carry_over", "best_fit", "drop_tail", "upsample_long"])


def build(policy: str, lengths: list[int], row_length: int, seed: int = 0) -> PackingPlan:
    return build_plan(policy, ListedSource(lengths), range(len(lengths)), row_length, seed)


def expected_row(plan: PackingPlan, row: int, lengths: list[int], mask_eod: bool) -> TokenRow:
    """Written out: a list of (document, position), one for each place of the row, None for padding."""
    length = plan.row_length
    places: list[tuple[int, int] | None] = []
    ends = []
    for document, start, count in plan.row_pieces(row).tolist():
        places += [(document, start + i) for i in range(count)]
        if len(places) < length or start + count == lengths[document]:
            ends.append(len(places))
    last = places[-1] if len(places) == length else None
    places += [None] * (length - len(places))
    follows = last is not None and last[1] + 1 < lengths[last[0]]
    places.append((last[0], last[1] + 1) if last is not None and follows else None)
    trained = []
    for place in range(length):
        here = places[place]
        label = places[place + 1]
        if here is None or label is None:
            trained.append(False)
        elif place + 1 in ends:
            trained.append(here[1] == lengths[here[0]] - 1 and label[1] == 0 and not mask_eod)
        else:
            assert label == (here[0], here[1] + 1)
            trained.append(True)
    tokens = [PAD if place is None else place[0] * STRIDE + place[1] for place in places]
    return TokenRow(np.array(tokens), np.array(ends, dtype=np.int64), np.array(trained))


@pytest.mark.parametrize("kind", [ListedSource, MaskedSource])
@given(policy=SOME_POLICIES, lengths=some_lengths, row_length=row_lengths, seed=seeds, mask_eod=st.booleans())
def test_rows_token_by_token(kind, policy: str, lengths: list[int], row_length: int, seed: int, mask_eod: bool) -> None:
    """A mask takes labels away and adds none."""
    plan = build(policy, lengths, row_length, seed)
    rows = PackedRows(kind(lengths), plan, seed, mask_eod=mask_eod, pad_id=PAD)
    for number in range(plan.rows):
        wanted = expected_row(plan, number, lengths, mask_eod)
        labels = wanted.tokens[1:]
        held = (labels // STRIDE % 2 == 1) | (labels % 3 == 0) | (kind is ListedSource)
        assert_same(rows.plan_row(number), TokenRow(wanted.tokens, wanted.document_ends, wanted.trained & held))
        assert_outlined(rows, number)


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds, mask_eod=st.booleans())
def test_carry_over_gives_the_rows_of_random(lengths: list[int], row_length: int, seed: int, mask_eod: bool) -> None:
    """Before the first epoch's end both are one stream of the same order; only a label across rows is not trained."""
    plan = build("carry_over", lengths, row_length, seed)
    packed = PackedRows(ListedSource(lengths), plan, seed, mask_eod=mask_eod)
    dataset = RowDataset(ListedSource(lengths), range(len(lengths)), row_length, seed, mask_eod=mask_eod)
    random = {dataset.row_index(sample): dataset.row(sample) for sample in range(plan.rows)}
    for number in range(sum(lengths) // row_length):
        row = packed.plan_row(number)
        random_row = random[number]
        if row_length in row.document_ends:
            random_row.trained[-1] = False
            random_row.tokens[-1] = 0
        assert_same(row, random_row)


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
def test_each_epoch_has_every_row_once(lengths: list[int], row_length: int, seed: int) -> None:
    plan = build("best_fit", lengths, row_length)
    rows = PackedRows(ListedSource(lengths), plan, seed)
    for epoch in (0, 1, 10**9):
        numbers = [rows.row_index(epoch * plan.rows + place) for place in range(plan.rows)]
        assert sorted(numbers) == list(range(plan.rows))
        assert_same(rows.row(epoch * plan.rows), rows.plan_row(numbers[0]))


OPTIONS = {
    "upsample_long": {"threshold": 5, "factor": 2.5},
    "decomposition": {"shortest": 1, "cycles": 2},
    "bm25": {"block_documents": 3},
}


def rows_of(plan: PackingPlan, source: ListedSource) -> list[TokenRow]:
    rows: RowDataset | PackedRows = PackedRows(source, plan, seed=0, pad_id=PAD)
    if plan.key.policy == "random":
        rows = RowDataset(source, range(len(source.document_lengths)), plan.row_length, plan.key.seed)
    return [rows.row(sample) for sample in range(plan.rows)]


def contexts(rows: list[TokenRow]) -> list[int]:
    """C_i of every token under the document mask, padding left out."""
    token_contexts = []
    for row in rows:
        layout = build_layout(len(row.tokens) - 1, row.document_ends, len(row.tokens) - 1)
        token_contexts += (layout.positions() + 1)[row.tokens[:-1] != PAD].tolist()
    return token_contexts


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


@pytest.mark.parametrize("policy", POLICIES)
@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
@settings(max_examples=40, deadline=None)
def test_the_report_is_what_the_rows_show(policy: str, lengths: list[int], row_length: int, seed: int) -> None:
    source = ListedSource(lengths)
    documents = range(len(lengths))
    if policy == "decomposition":
        row_length = 1 << row_length.bit_length() - 1
    try:
        plan = build_plan(policy, source, documents, row_length, seed, OPTIONS.get(policy))
    except UserError:
        assert policy in ("whole_document", "split_drop", "decomposition")
        return
    counted = report(plan, source, documents)
    rows = rows_of(plan, source)
    inputs = input_tokens(rows)
    every = set(tokens_of(lengths))
    places = [token for row in rows for token in row.tokens[:-1].tolist()]
    assert (counted.documents, counted.tokens) == (sum(map(bool, lengths)), sum(lengths))
    assert (counted.rows, counted.row_tokens) == (len(rows), len(places))
    assert counted.kept_tokens == len(every & set(inputs))
    assert counted.repeated_tokens == inputs.total() - len(inputs)
    assert counted.padding_tokens == places.count(PAD)
    assert counted.dropped_documents == counted.documents - len({token // STRIDE for token in inputs})
    assert counted.truncated_documents == len(truncated(rows, lengths))
    assert counted.mean_context == pytest.approx(np.mean(contexts(rows)))


def test_what_each_policy_keeps_of_prolongs_long_documents() -> None:
    """Worked by hand: rows of 64 tokens, documents of 200, 64, 130 and 63: 3, 1, 2 and no whole rows."""
    source = ListedSource([200, 64, 130, 63])
    documents = range(4)

    def counted(policy: str, **options: int) -> tuple[int, int]:
        counts = report(build_plan(policy, source, documents, 64, 0, options), source, documents)
        return counts.rows, counts.kept_tokens

    assert counted("whole_document") == (6, 384)
    assert counted("whole_document", rows_per_document=1) == (3, 192)
    assert counted("whole_document", below=130) == (1, 64)


def test_what_is_kept_of_joined_books() -> None:
    """Worked by hand: subjects of 30 + 50 + 20, 10 + 5 and 64 tokens, rows of 32: 96 of 100 and all of 64."""
    source = ListedSource([30, 10, 50, 5, 64, 20], sources=[0, 1, 0, 1, 2, 0])
    documents = range(6)
    joined = report(build_plan("whole_document", source, documents, 32, 0, {"join_sources": 1}), source, documents)
    assert (joined.rows, joined.kept_tokens) == (5, 160)
    assert (joined.dropped_documents, joined.truncated_documents) == (2, 3)
    assert joined.mean_context == 16.5  # 1 to 32 keys in each row
