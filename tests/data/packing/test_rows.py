"""Rows of plans: inputs, labels, ends and trained positions, token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data.packing.plan import PackingPlan
from megatron_ext.data.packing.policies import build_plan
from megatron_ext.data.row import TokenRow
from megatron_ext.data.rows.dataset import RowDataset
from megatron_ext.data.rows.packed import PackedRows
from tests.data.packing.sources import (
    PAD,
    STRIDE,
    ListedSource,
    MaskedSource,
    assert_same,
    row_lengths,
    seeds,
    some_lengths,
)

POLICIES = st.sampled_from(["carry_over", "best_fit", "drop_tail", "upsample_long"])


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
        here, label = places[place], places[place + 1]
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
@given(policy=POLICIES, lengths=some_lengths, row_length=row_lengths, seed=seeds, mask_eod=st.booleans())
@settings(max_examples=150, deadline=None)
def test_rows_token_by_token(
    kind: type[ListedSource], policy: str, lengths: list[int], row_length: int, seed: int, mask_eod: bool
) -> None:
    """A mask takes labels away and adds none."""
    plan = build(policy, lengths, row_length, seed)
    rows = PackedRows(kind(lengths), plan, seed, mask_eod=mask_eod, pad_id=PAD)
    for number in range(plan.rows):
        wanted = expected_row(plan, number, lengths, mask_eod)
        labels = wanted.tokens[1:]
        held = (labels // STRIDE % 2 == 1) | (labels % 3 == 0) | (kind is ListedSource)
        assert_same(rows.plan_row(number), TokenRow(wanted.tokens, wanted.document_ends, wanted.trained & held))


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds, mask_eod=st.booleans())
@settings(max_examples=80, deadline=None)
def test_carry_over_gives_the_rows_of_random(lengths: list[int], row_length: int, seed: int, mask_eod: bool) -> None:
    """Before the first epoch's end both are one stream of the same order; only a label across rows is not trained."""
    plan = build("carry_over", lengths, row_length, seed)
    packed = PackedRows(ListedSource(lengths), plan, seed, mask_eod=mask_eod)
    dataset = RowDataset(ListedSource(lengths), range(len(lengths)), row_length, seed, mask_eod=mask_eod)
    random = {dataset.row_index(sample): dataset.row(sample) for sample in range(plan.rows)}
    for number in range(sum(lengths) // row_length):
        row, other = packed.plan_row(number), random[number]
        if row_length in row.document_ends:
            other.trained[-1], other.tokens[-1] = False, 0
        assert_same(row, other)


@given(lengths=some_lengths, row_length=row_lengths, seed=seeds)
@settings(max_examples=80, deadline=None)
def test_each_epoch_has_every_row_once(lengths: list[int], row_length: int, seed: int) -> None:
    plan = build("best_fit", lengths, row_length)
    rows = PackedRows(ListedSource(lengths), plan, seed)
    for epoch in (0, 1, 10**9):
        numbers = [rows.row_index(epoch * plan.rows + place) for place in range(plan.rows)]
        assert sorted(numbers) == list(range(plan.rows))
        assert_same(rows.row(epoch * plan.rows), rows.plan_row(numbers[0]))
