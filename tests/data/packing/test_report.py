"""The report against the rows that are read, token by token."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

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
    rows: RowDataset | PackedRows = PackedRows(source, plan, seed=0, pad_id=PAD)
    if plan.key.policy == "random":
        rows = RowDataset(source, range(len(source.document_lengths)), plan.row_length, plan.key.seed)
    return [rows.row(sample) for sample in range(plan.rows)]


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


@pytest.mark.parametrize("policy", POLICIES)
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
    assert counted.repeated_tokens == inputs.total() - len(inputs)
    assert counted.padding_tokens == places.count(PAD)
    assert counted.dropped_documents == counted.documents - len({token // STRIDE for token in inputs})
    assert counted.truncated_documents == len(truncated(rows, lengths))
    found = contexts(rows)
    bins = Counter(int(context).bit_length() - 1 for context in found)
    assert counted.context_histogram == tuple(bins[b] for b in range(max(bins) + 1))
    assert counted.mean_context == pytest.approx(np.mean(found))


def test_what_each_policy_keeps_of_prolongs_long_documents() -> None:
    """Worked by hand: rows of 64 tokens, documents of 200, 64, 130 and 63: 3, 1, 2 and no whole rows."""
    source, documents = ListedSource([200, 64, 130, 63]), range(4)

    def counted(policy: str, **options: int) -> tuple[int, int]:
        found = report(build_plan(policy, source, documents, 64, 0, options), source, documents)
        return found.rows, found.kept_tokens

    assert counted("whole_document") == (6, 384)
    assert counted("whole_document", rows_per_document=1) == (3, 192)
    assert counted("whole_document", below=130) == (1, 64)
    assert counted("split_drop") == (6, 384)
    assert counted("best_fit")[1] == counted("carry_over")[1] == 457


def test_what_is_kept_of_joined_books() -> None:
    """Worked by hand: subjects of 30 + 50 + 20, 10 + 5 and 64 tokens, rows of 32: 96 of 100 and all of 64."""
    source, documents = ListedSource([30, 10, 50, 5, 64, 20], sources=[0, 1, 0, 1, 2, 0]), range(6)
    joined = report(build_plan("whole_document", source, documents, 32, 0, {"join_sources": 1}), source, documents)
    assert (joined.rows, joined.kept_tokens) == (5, 160)
    assert (joined.dropped_documents, joined.truncated_documents) == (2, 3)
    assert joined.context_histogram == (5, 10, 20, 40, 80, 5)
